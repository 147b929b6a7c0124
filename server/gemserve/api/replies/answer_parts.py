"""The parts of an answer while it comes: texts, thinking and calls, in the order of the answer.

The protocols that send an answer as a list of items build their replies and streams from this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gemserve.api.replies.answer_reader import AnswerRules, Kind, Piece
from gemserve.contract.events import TextDelta, TokenLogprob


@dataclass(slots=True)
class Part:
    """`text`: of a call, its arguments. `call_id` and `name` are those of a call."""

    index: int
    text: str = ""
    kind: Kind = "text"
    call_id: str = ""
    name: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of a text

    @property
    def is_call(self) -> bool:
        return self.kind == "call"

    @property
    def is_text(self) -> bool:
        return self.kind == "text"

    @property
    def is_thinking(self) -> bool:
        return self.kind == "thinking"


@dataclass(frozen=True, slots=True)
class AnswerChange:
    """What happens to a part. `text` and `logprobs` are what it grows by."""

    kind: Literal["opened", "grown", "closed"]
    part: Part
    text: str = ""
    logprobs: Sequence[TokenLogprob] = ()


class AnswerParts:
    """Turns an answer's text into changes of its parts. At most the last part is open.

    `num_thinking_tokens` counts the tokens of its thinking so far.
    """

    def __init__(self, rules: AnswerRules) -> None:
        self.parts: list[Part] = []
        self.num_thinking_tokens = 0
        self._rules = rules
        self._reader = rules.reader()
        self._scored: list[TokenLogprob] = []  # of tokens whose text has not come yet

    @property
    def has_calls(self) -> bool:
        return any(part.is_call for part in self.parts)

    def push(self, delta: TextDelta) -> list[AnswerChange]:
        """Take more text; return what is now final, which may be nothing."""
        self._scored += delta.logprobs
        was_thinking = self._reader.is_thinking
        pieces = self._reader.push(delta.text)
        if was_thinking or self._reader.is_thinking:
            self.num_thinking_tokens += len(delta.token_ids)
        return list(self._add(pieces))

    def finish(self, *, has_text: bool = False) -> list[AnswerChange]:
        """The rest. With `has_text` an answer that says nothing has an empty text, too."""
        changes = list(self._add(self._reader.finish()))
        if has_text and not self.parts and not self._rules.is_forced:
            changes += self._open(Part(0))
        if self.parts:
            last = self.parts[-1]
            if last.is_text:
                last.logprobs += self._scored
            changes.append(self._close())
        return changes

    def _add(self, pieces: Sequence[Piece]) -> Iterator[AnswerChange]:
        for piece in pieces:
            if self._is_new(piece):
                yield from self._open(self._part(piece))
            scored, self._scored = self._scored, []
            if piece.kind != "text":
                scored = []
            self.parts[-1].logprobs += scored
            if piece.text:
                yield self._grow(piece.text, scored)

    def _is_new(self, piece: Piece) -> bool:
        """Does a piece begin a part?"""
        return piece.call is not None or not self.parts or self.parts[-1].kind != piece.kind

    def _part(self, piece: Piece) -> Part:
        call = piece.call
        if call is None:
            return Part(len(self.parts), kind=piece.kind)
        return Part(len(self.parts), kind="call", call_id=call.id, name=call.name)

    def _open(self, part: Part) -> Iterator[AnswerChange]:
        if self.parts:
            yield self._close()
        self.parts.append(part)
        yield AnswerChange("opened", part)

    def _close(self) -> AnswerChange:
        return AnswerChange("closed", self.parts[-1])

    def _grow(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> AnswerChange:
        self.parts[-1].text += text
        return AnswerChange("grown", self.parts[-1], text, logprobs)
