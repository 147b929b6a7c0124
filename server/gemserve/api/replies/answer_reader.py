"""Find text, thinking and calls of tools in an answer while it comes.

If the answer is forced to be a call, the grammar makes it `{"name": …, "arguments": {…}}`, and the
arguments are passed on piece by piece. Otherwise what begins like a call or like thinking, in one
of the forms that chat templates write, is held back until it is one, or cannot be one.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

from gemserve.api.replies.call_forms import (
    FORMS,
    HELD_FORMS,
    Call,
    CallForm,
    Functions,
    read_form,
)
from gemserve.api.replies.reply_types import ChatFinishReason, FinishReason
from gemserve.api.replies.text_scanner import Steps, TextScanner
from gemserve.api.requests.tool_choice import ToolCallRules
from gemserve.contract.requests import Request
from gemserve.prompting.encoding import decode

# one that is not closed is taken to its end: else each quote in it would be tried as a beginning
_STRING = re.compile(r'"(?:[^"\\]|\\.)*("?)', re.DOTALL)
_FORCED = re.compile(r'\{"name": ?"([^"]*)", ?"arguments": ?(?=\{)')
_THINKING = {"<think>": "</think>", "[THINK]": "[/THINK]"}
_LAST_OF_PROMPT = 8  # tokens
_STARTS = re.compile(r"[<\[{`]")
_MARKS = re.compile(r"[<\[]")
_LONGEST_HEAD = 256
# gpt-oss: every message of an answer has a channel, and a call names its function
_CHANNELS = ("<|channel|>", "<|start|>")
_CALLED_AT_ONCE = " to=functions."  # behind the prompt's "<|start|>assistant"
_CHANNEL_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_CHANNEL = re.compile(
    r"(?:<\|start\|>assistant)?(?:\s*to=([\w.-]+))?\s*<\|channel\|>(\w+)(?:\s+to=([\w.-]+))?"
    r"\s*(?:<\|constrain\|>)?\w*\s*"
)
_LONGEST_BLANKS = 64


Kind = Literal["text", "thinking", "call"]


@dataclass(frozen=True, slots=True)
class Piece:
    """A piece of an answer. `text`: of a call, its arguments. `call`: with its first piece."""

    kind: Kind
    text: str
    call: Call | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerRules:
    """What an answer may have.

    `calls`: which calls, if any. `has_markers`: those of thinking count. `opens_thinking`: the
    prompt ends with such a marker.
    """

    calls: ToolCallRules | None = None
    has_markers: bool = False
    opens_thinking: bool = False

    @property
    def is_forced(self) -> bool:
        return self.calls is not None and self.calls.is_forced

    def reader(self) -> Reader:
        return ForcedCallReader() if self.is_forced else AnswerReader(self)

    def finish_reason(self, reason: FinishReason, *, has_calls: bool) -> ChatFinishReason:
        """ "tool_calls" for calls, unless `tool_choice` names the function: this is as OpenAI's."""
        is_named = self.calls is not None and self.calls.is_named
        return "tool_calls" if has_calls and reason == "stop" and not is_named else reason


def answer_rules(tokenizer: Any, request: Request, calls: ToolCallRules | None) -> AnswerRules:
    """The rules for the answer to a chat's request."""
    has_markers = request.shows_markers
    opens_thinking = False
    if has_markers:
        end = decode(tokenizer, request.prompt_ids[-_LAST_OF_PROMPT:])
        opens_thinking = end.rstrip().endswith(tuple(_THINKING))
    return AnswerRules(calls=calls, has_markers=has_markers, opens_thinking=opens_thinking)


class AnswerReader:
    """Turns the text of a free answer into pieces. `calls` holds its calls so far.

    What is read twice is bounded by the length of the answer, so reading takes linear time.
    """

    def __init__(self, rules: AnswerRules) -> None:
        held = rules.calls
        self.calls: list[Call] = []
        self.is_thinking = rules.opens_thinking
        self._rules = rules
        self._functions = None if held is None else Functions(held)
        self._forms: Sequence[CallForm] = ()
        if held is not None:
            self._forms = HELD_FORMS if held.is_held else FORMS
        self._scanner = TextScanner()
        self._left = 1 << 16  # characters that may be read a second time
        self._out: list[Piece] = []
        self._blanks = ""  # behind the text: they are dropped if a call follows
        self._is_fresh = True  # nothing but blanks since the beginning, or since a call
        self._is_line_start = self._is_in_fence = self._has_text = self._has_channels = False
        self._drops_blanks = self._has_thought = False
        self._thought_blanks = ""
        self._steps = self._read()

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what is now final, which may be nothing."""
        self._scanner.add(text)
        self._left += 2 * len(text)
        return self._go_on()

    def finish(self) -> list[Piece]:
        """The rest of the answer."""
        self._scanner.is_whole = True
        return self._go_on()

    def _go_on(self) -> list[Piece]:
        next(self._steps, None)
        out, self._out = self._out, []
        return list(_joined(out))

    def _read(self) -> Steps[None]:
        if self.is_thinking:
            yield from self._think(tuple(_THINKING.values()))
        scanner = self._scanner
        if self._rules.has_markers and (yield from scanner.take(_CALLED_AT_ONCE)):
            yield from self._take_channel(_CALLED_AT_ONCE, 0)
        starts = _STARTS if self._functions else _MARKS if self._rules.has_markers else None
        while True:
            if text := scanner.take_plain(starts):
                self._say(text)
            elif scanner.at < scanner.length:
                yield from self._take_mark()
            elif scanner.is_whole:
                break
            else:
                yield
        if self._blanks and not (self.calls and self._is_fresh):
            self._out.append(Piece("text", self._blanks))

    def _take_mark(self) -> Steps[None]:
        """Take what begins with a character that a marker begins with."""
        start = self._scanner.at
        first = self._scanner.between(start, start + 1)
        forms = {form.opener: form for form in self._forms if self._counts(form, first)}
        thinking = tuple(_THINKING) if self._rules.has_markers and self._is_fresh else ()
        channels = (*_CHANNELS, *(_CHANNEL_ENDS if self._has_channels else ()))
        marks = (*forms, *thinking, *(channels if self._rules.has_markers else ()))
        mark = yield from self._scanner.take_any(marks)
        if mark in forms:
            yield from self._take_calls(forms[mark], start)
        elif mark in thinking:
            yield from self._think((_THINKING[mark],))
        elif mark in _CHANNELS:
            yield from self._take_channel(mark, start)
        elif mark is None:
            self._scanner.at = start + 1
            self._say(first)

    def _counts(self, form: CallForm, first: str) -> bool:
        """Does a form count here, where the text goes on with this character?"""
        if form.opener[0] != first:
            return False
        if self._functions is not None and self._functions.rules.is_held and not self._is_fresh:
            return False
        is_line = self._is_line_start or self._is_fresh
        return not form.is_line or (is_line and not (self._is_in_fence and form.opener != "```"))

    def _take_calls(self, form: CallForm, start: int) -> Steps[None]:
        assert self._functions is not None
        is_fence = form.opener == "```"
        items = None
        if not (is_fence and self._is_in_fence):
            items = yield from read_form(self._scanner, self._functions, form)
        if items is None:
            self._is_in_fence ^= is_fence
            self._back_to_text(start, start + len(form.opener))
            return
        if not any(isinstance(item, Call) for item in items):
            items = [self._scanner.between(start, self._scanner.at)]
        for item in items:
            self._call(item) if isinstance(item, Call) else self._say(item)

    def _back_to_text(self, start: int, opened: int) -> None:
        """What was tried is no call: only its opener is text, unless too much was read twice."""
        read = self._scanner.at - opened
        if read <= self._left:
            self._left -= read
            self._scanner.at = opened
        self._say(self._scanner.between(start, self._scanner.at))

    def _take_channel(self, mark: str, start: int) -> Steps[None]:
        head = yield from self._scanner.take_until(("<|message|>",), _LONGEST_HEAD)
        found = _CHANNEL.fullmatch(mark + (head or ""))
        if found is None:
            self._back_to_text(start, start + len(mark))
            return
        self._has_channels = True
        called = found[1] or found[3]
        if called is not None:
            yield from self._take_channel_call(called.removeprefix("functions."), start)
        elif found[2] == "analysis":
            yield from self._think((*_CHANNEL_ENDS, *_CHANNELS))
        elif self._has_text:
            self._blanks = "\n\n"

    def _take_channel_call(self, name: str, start: int) -> Steps[None]:
        yield from self._scanner.skip_blanks()
        value = yield from self._scanner.take_json()
        call = None if self._functions is None else self._functions.call(name, value)
        yield from self._scanner.take_any(_CHANNEL_ENDS)
        if call is None:
            self._say(self._scanner.between(start, self._scanner.at))
        else:
            self._call(call)

    def _think(self, ends: Sequence[str]) -> Steps[None]:
        """Take thinking up to the first of `ends`."""
        self.is_thinking, self._has_thought = True, False
        self._blanks = self._thought_blanks = ""
        self._drops_blanks = not self._has_text
        end = yield from self._think_until(ends)
        if end is None:
            return  # it was cut off
        self.is_thinking, self._is_fresh = False, True
        if end in _CHANNELS:
            self._scanner.at -= len(end)

    def _think_until(self, ends: Sequence[str]) -> Steps[str | None]:
        scanner = self._scanner
        while True:
            if text := scanner.take_plain(_MARKS):
                self._say_thought(text)
            elif scanner.at < scanner.length:
                end = yield from scanner.take_any(ends)
                if end is not None:
                    return end
                self._say_thought(scanner.between(scanner.at, scanner.at + 1))
                scanner.at += 1
            elif scanner.is_whole:
                return None
            else:
                yield

    def _say_thought(self, text: str) -> None:
        text = self._thought_blanks + (text if self._has_thought else text.lstrip())
        kept, self._thought_blanks = _without_blanks(text)
        if kept:
            self._has_thought = True
            self._out.append(Piece("thinking", kept))

    def _say(self, text: str) -> None:
        self._is_fresh = self._is_fresh and not text.strip()
        self._is_line_start = text.endswith("\n")
        text = self._blanks + text
        if self._drops_blanks:
            text = text.lstrip()
            self._drops_blanks = not text
        may_end = self._functions is not None or self._is_fresh
        kept, self._blanks = _without_blanks(text) if may_end else (text, "")
        if kept:
            self._has_text = True
            self._out.append(Piece("text", kept))

    def _call(self, call: Call) -> None:
        self._blanks, self._is_fresh = "", True
        self._drops_blanks = not self._has_text
        if self.calls and self._functions is not None and not self._functions.rules.is_parallel:
            return
        self.calls.append(call)
        self._out.append(Piece("call", call.arguments, call))


class ForcedCallReader:
    """Turns the text of a call that a grammar holds into pieces. `calls` has it."""

    is_thinking = False

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._held = ""
        self._arguments: list[str] = []

    def push(self, text: str) -> list[Piece]:
        """Take more text; return what is now final, which may be nothing."""
        self._held += text
        if self.calls:
            return self._add(self._held[:-1], self._held[-1:])
        found = _FORCED.match(self._held)
        if found is None:
            return []
        self.calls.append(Call(found[1], ""))
        # the last character may be the brace that closes the call, not its arguments
        rest = self._held[found.end() :]
        return self._add(rest[:-1], rest[-1:], self.calls[0])

    def finish(self) -> list[Piece]:
        """The rest of the call."""
        if not self.calls:
            return []  # cut off before its name was known
        pieces = [] if _is_closed("".join(self._arguments)) else self._add(self._held, "")
        self.calls[0].arguments = "".join(self._arguments)
        return pieces

    def _add(self, text: str, held: str, call: Call | None = None) -> list[Piece]:
        """Add to the arguments, and hold the rest of the text back."""
        self._held = held
        self._arguments.append(text)
        return [Piece("call", text, call)] if text or call else []


Reader = ForcedCallReader | AnswerReader


def _joined(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """The pieces, of which neighbours are one if they are of one text."""
    for kind, group in groupby(pieces, key=lambda piece: piece.kind):
        if kind == "call":
            yield from group
        else:
            yield Piece(kind, "".join(piece.text for piece in group))


def _without_blanks(text: str) -> tuple[str, str]:
    """The text up to the blanks at its end, and these. Very many of them are text."""
    kept = text.rstrip()
    return (kept, text[len(kept) :]) if len(text) - len(kept) <= _LONGEST_BLANKS else (text, "")


def _is_closed(text: str) -> bool:
    """Is every brace closed? A JSON parser would refuse deep nesting and long numbers."""
    bare = _STRING.sub("", text)
    return all(_STRING.findall(text)) and bare.count("{") == bare.count("}") > 0
