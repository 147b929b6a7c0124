"""What is known of a prompt's parts: messages, protected ranges, breaks in its text."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import IntEnum
from typing import Literal

import numpy as np
import numpy.typing as npt

TokenArray = npt.NDArray[np.int64]
ChatRole = Literal["system", "developer", "user", "assistant", "tool", "template"]
SHORT_TURN = 96  # a chat's last turn of so few tokens is no document, however short others are
MOST_ENCLOSING = 4  # lines around a passage


class Priority(IntEnum):
    """Why tokens are protected. Up to `FRAME` they are always read, outside of the budget.

    The others come out of the budget, and the lowest first if it cannot hold them all.
    """

    BOS = 0
    QUESTION = 1
    SYSTEM = 2
    TOOLS = 3  # short results of the calls that the model is to go on from
    FRAME = 4  # what the chat template puts around messages, tools and calls among it
    BEFORE = 5  # the paragraphs before the question, which may be part of it
    HEAD = 6  # the beginning of a document or a long question, which often says what to do
    TAIL = 7  # the end of a document
    END = 8  # the end of a long request, which may be what it asks if no question was found


def _no_tokens() -> npt.NDArray[np.uint32]:
    return np.zeros(0, dtype=np.uint32)


@dataclass(frozen=True, slots=True, kw_only=True)
class EnclosingLines:
    """The lines that say where in a text a passage stands: `class …` and `def …`, or headings.

    A stretch is consecutive lines that the same line encloses. `starts`: the token that each begins
    with, ascending. `line_starts`, `line_stops`: first token of the line that encloses it, and the
    token behind its last; both 0 if there is none. `is_heading`: that line is one of prose. All
    [stretches].
    """

    starts: npt.NDArray[np.uint32] = field(default_factory=_no_tokens)
    line_starts: npt.NDArray[np.uint32] = field(default_factory=_no_tokens)
    line_stops: npt.NDArray[np.uint32] = field(default_factory=_no_tokens)
    is_heading: npt.NDArray[np.uint32] = field(default_factory=_no_tokens)

    def around(self, token: int) -> tuple[tuple[int, int], ...]:
        """The half-open ranges of the lines that enclose this token's line, the nearest first.

        At most `MOST_ENCLOSING`.
        """
        found: list[tuple[int, int]] = []
        while len(found) < MOST_ENCLOSING:
            # a number of another type would have all of the array converted
            stretch = int(self.starts.searchsorted(np.uint32(token), side="right")) - 1
            if stretch < 0 or not self.line_starts[stretch] < self.line_stops[stretch] <= token:
                break
            token = int(self.line_starts[stretch])
            found.append((token, int(self.line_stops[stretch])))
        return tuple(found)


NO_ENCLOSING = EnclosingLines()


@dataclass(frozen=True, slots=True, kw_only=True)
class TextBreaks:
    """Token positions that begin a paragraph, a sentence or list item, and a line; ascending.

    `with_line_end`: the tokens that are the line end in front of a line together with its
    indentation, as tokenizers like GPT-2's have them. Such a line begins with the next token.
    `enclosing`: which lines enclose others.
    """

    paragraphs: tuple[int, ...] = ()
    sentences: tuple[int, ...] = ()
    lines: tuple[int, ...] = ()
    with_line_end: npt.NDArray[np.uint32] = field(default_factory=_no_tokens, compare=False)
    enclosing: EnclosingLines = field(default=NO_ENCLOSING, compare=False)

    def is_with_line_end(self, token: int) -> bool:
        at = int(self.with_line_end.searchsorted(np.uint32(max(0, token))))
        return at < len(self.with_line_end) and int(self.with_line_end[at]) == token


NO_BREAKS = TextBreaks()


@dataclass(frozen=True, slots=True, kw_only=True)
class Separators:
    """Token ids of a blank line, and of a line's end; both empty: passages are not separated."""

    blank_line: tuple[int, ...] = ()
    line_end: tuple[int, ...] = ()


NO_SEPARATORS = Separators()


@dataclass(frozen=True, slots=True)
class ProtectedRange:
    """Token positions start..stop−1 of a prompt that a filter should keep."""

    start: int
    stop: int
    priority: Priority

    @property
    def is_always_read(self) -> bool:
        """Is it outside of the budget?"""
        return self.priority <= Priority.FRAME


@dataclass(frozen=True, slots=True)
class MessagePlace:
    """Where a message of a chat is: token positions start..stop−1.

    `index`: its number in the chat, from 0.
    """

    index: int
    role: ChatRole
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PartDigests:
    """What tells the beginnings of a chat from those of others. They are compared, never read.

    `parts`: name of each part, in the order in which most prompts have them, and the digest of it
    and of all before it. `tools_in_any_order`: as the digest of the tools, but of the same tools
    in another order it is the same.
    """

    parts: tuple[tuple[str, bytes], ...]
    tools_in_any_order: bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Excerpt:
    """A segment of a library's file in a prompt, at token positions start..stop−1."""

    library: str
    file: str
    file_id: str
    kind: str
    heading: str  # what the text is part of
    first_line: int  # from 1: where the text begins in the file
    first_character: int
    pages: tuple[int, ...]  # the first character of each page of the file, if it has pages
    text: str
    rank: int = 0  # its place among what the search found, from 0
    start: int = 0
    stop: int = 0
    # where each token begins in `text`: [tokens]
    characters: TokenArray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WrittenText:
    """What a prompt's tokens were made of. `starts`, `stops`: the half-open range of characters of
    each token, ascending: [tokens].
    """

    text: str
    starts: TokenArray
    stops: TokenArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StandsFor:
    """The tokens of another model's prompt that those of a reader's prompt stand for.

    Half-open ranges, one for each token of the reader's prompt: [tokens]. Empty: for none.
    """

    starts: TokenArray
    stops: TokenArray
