"""The parts of an answer while it comes: texts and calls of tools, in the order of the answer.

The protocols that send an answer as a list of items build their replies and streams from this.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from gemserve.api.replies.reply_types import CallPart, Delta
from gemserve.api.replies.tool_call_reader import ToolCallReader
from gemserve.api.requests.tool_choice import ToolCallRules
from gemserve.types import TextDelta, TokenLogprob


@dataclass(slots=True)
class Part:
    """`text`: of a call, its arguments. `call_id` and `name` are those of a call."""

    index: int
    text: str = ""
    call_id: str = ""
    name: str = ""
    logprobs: list[TokenLogprob] = field(default_factory=list)  # of a text

    @property
    def is_call(self) -> bool:
        return self.call_id != ""


@dataclass(frozen=True, slots=True)
class AnswerChange:
    """What happens to a part. `text` and `logprobs` are what it grows by."""

    kind: Literal["opened", "grown", "closed"]
    part: Part
    text: str = ""
    logprobs: Sequence[TokenLogprob] = ()


class AnswerParts:
    """Turns an answer's text into changes of its parts. At most the last part is open."""

    def __init__(self, rules: ToolCallRules | None) -> None:
        """`rules`: which calls the answer may have; None if it can only be text."""
        self.parts: list[Part] = []
        self._rules = rules
        self._reader = None if rules is None else ToolCallReader(rules)
        self._scored: list[TokenLogprob] = []  # of tokens whose text has not come yet

    @property
    def has_calls(self) -> bool:
        return any(part.is_call for part in self.parts)

    def push(self, delta: TextDelta) -> list[AnswerChange]:
        """Take more text; return what is now final, which may be nothing."""
        self._scored += delta.logprobs
        if self._reader is None:
            return list(self._add({"content": delta.text}))
        return list(self._add(self._reader.push(delta.text)))

    def finish(self, *, has_text: bool = False) -> list[AnswerChange]:
        """The rest. With `has_text` an answer that says nothing has an empty text, too."""
        changes = [] if self._reader is None else list(self._add(self._reader.finish()))
        is_forced = self._rules is not None and self._rules.is_forced
        if has_text and not self.parts and not is_forced:
            changes += self._open(Part(0))
        if self.parts:
            last = self.parts[-1]
            if not last.is_call:
                last.logprobs += self._scored
            changes.append(AnswerChange("closed", last))
        return changes

    def _add(self, delta: Delta) -> Iterator[AnswerChange]:
        text = delta.get("content")
        if text:
            if not self.parts or self.parts[-1].is_call:
                yield from self._open(Part(len(self.parts)))
            scored, self._scored = self._scored, []
            self.parts[-1].logprobs += scored
            yield self._grow(text, scored)
        for call in delta.get("tool_calls", ()):
            yield from self._add_call(call)

    def _add_call(self, call: CallPart) -> Iterator[AnswerChange]:
        """A part of a call. Calls come one after the other."""
        if "id" in call:
            name = call["function"]["name"]
            yield from self._open(Part(len(self.parts), call_id=call["id"], name=name))
        if arguments := call["function"]["arguments"]:
            yield self._grow(arguments)

    def _open(self, part: Part) -> Iterator[AnswerChange]:
        if self.parts:
            yield AnswerChange("closed", self.parts[-1])
        self.parts.append(part)
        yield AnswerChange("opened", part)

    def _grow(self, text: str, logprobs: Sequence[TokenLogprob] = ()) -> AnswerChange:
        self.parts[-1].text += text
        return AnswerChange("grown", self.parts[-1], text, logprobs)
