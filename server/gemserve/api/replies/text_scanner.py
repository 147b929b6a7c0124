"""Read a text from its beginning while it comes, in time that is linear in its length.

What takes text is a generator: it yields where it needs more, and goes on when more has come.
"""

from __future__ import annotations

import json
import re
from collections.abc import Generator, Sequence
from io import StringIO
from typing import TypeVar

T = TypeVar("T")
Steps = Generator[None, None, T]
BROKEN = object()  # no JSON
_WINDOW = 4096  # characters that are copied at a time
_PLAIN = 256  # of a text that may have a marker everywhere
_OUTSIDE = re.compile(r'["{}\[\]<`]')  # JSON has the last two in texts only
_INSIDE = re.compile(r'["\\]')


class TextScanner:
    """A text as far as it has come, and a place in it. `is_whole`: nothing more comes."""

    def __init__(self) -> None:
        self._text = StringIO()
        self.length = 0
        self.at = 0
        self.is_whole = False

    def add(self, text: str) -> None:
        self._text.seek(self.length)
        self._text.write(text)
        self.length += len(text)

    def between(self, start: int, stop: int) -> str:
        self._text.seek(start)
        return self._text.read(max(0, min(stop, self.length) - start))

    def take_plain(self, trigger: re.Pattern[str] | None) -> str:
        """What is there, up to a character that matches, or a part of it."""
        text = self.between(self.at, self.at + _PLAIN)
        found = None if trigger is None else trigger.search(text)
        text = text if found is None else text[: found.start()]
        self.at += len(text)
        return text

    def peek(self, count: int) -> Steps[str]:
        """The next characters; fewer at the end of the text."""
        while self.at + count > self.length and not self.is_whole:
            yield
        return self.between(self.at, self.at + count)

    def take_any(self, texts: Sequence[str]) -> Steps[str | None]:
        """The longest of `texts` that comes next; None if it is none of them."""
        longest = max(map(len, texts), default=0)
        while True:
            there = self.between(self.at, self.at + longest)
            is_open = len(there) < longest and not self.is_whole
            if is_open and any(text != there and text.startswith(there) for text in texts):
                yield
                continue
            found = max((text for text in texts if there.startswith(text)), key=len, default=None)
            self.at += len(found or "")
            return found

    def take(self, text: str) -> Steps[bool]:
        return (yield from self.take_any((text,))) is not None

    def take_run(self, characters: re.Pattern[str], most: int) -> Steps[str]:
        """Characters that each match, at most so many."""
        start = self.at
        while self.at - start < most:
            there = self.between(self.at, min(self.at + _WINDOW, start + most))
            wrong = next((i for i, each in enumerate(there) if not characters.match(each)), None)
            self.at += len(there) if wrong is None else wrong
            if wrong is not None or (self.is_whole and self.at == self.length):
                break
            if self.at == self.length:
                yield
        return self.between(start, self.at)

    def skip_blanks(self) -> Steps[None]:
        while True:
            there = self.between(self.at, self.at + _WINDOW)
            rest = there.lstrip()
            self.at += len(there) - len(rest)
            if rest or (self.is_whole and self.at == self.length):
                return
            if self.at == self.length:
                yield

    def take_until(
        self, ends: Sequence[str], most: int | None = None, *, may_end: bool = False
    ) -> Steps[str | None]:
        """The text before the first of `ends`, which is taken, too.

        None if it has more than `most` characters, or if none follows. With `may_end` the text may
        end there instead.
        """
        start = look = self.at
        pattern, overlap = re.compile("|".join(map(re.escape, ends))), max(map(len, ends)) - 1
        while True:
            there = self.between(look, look + _WINDOW)
            if found := pattern.search(there):
                self.at = look + found.end()
                return self.between(start, look + found.start())
            self.at = look + len(there)
            look = max(look, self.at - overlap)
            if most is not None and look - start > most:
                return None
            if self.at == self.length:
                if self.is_whole:
                    return self.between(start, self.length) if may_end else None
                yield

    def take_json(self) -> Steps[object]:
        """The value of a JSON object or array; `BROKEN` if there is none.

        Its last braces may be missing where a mark follows, or the bracket of a list around it.
        """
        start = self.at
        num_open = yield from self._pass_structure()
        if num_open is None:
            return BROKEN
        text = self.between(start, self.at) + "}" * num_open
        if text.startswith("{") and text.endswith("]"):
            text, self.at = f"{text[:-1]}}}", self.at - 1
        try:
            # models write line breaks into texts
            value: object = json.loads(text, strict=False)
        except (ValueError, RecursionError):
            return BROKEN
        return value

    def _pass_structure(self) -> Steps[int | None]:
        """Go behind the bracket that closes the one at the beginning, or to what is no JSON.

        How many brackets are then open; None at the end of the text.
        """
        depth, is_inside = 0, False
        while True:
            there, at = self.between(self.at, self.at + _WINDOW), 0
            while found := (_INSIDE if is_inside else _OUTSIDE).search(there, at):
                mark, at = found[0], found.end()
                if mark == "\\":
                    at += 1
                elif mark == '"':
                    is_inside = not is_inside
                elif mark in "<`":
                    self.at += found.start()
                    return depth
                else:
                    depth += 1 if mark in "{[" else -1
                    if depth <= 0:
                        self.at += at
                        return 0
            self.at += max(len(there), at)  # the character behind a backslash may not be there yet
            while self.at >= self.length:
                if self.is_whole:
                    self.at = self.length
                    return None
                yield
