"""Ids for the calls of a history that have none, and for the results of calls.

What OpenAI had before tools knows only names, and some clients send neither ids nor names. A result
without an id belongs to the first call in front of it that has its name, or the first at all, and
that has no result yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemserve.api.requests.chat_body import Message, ToolCall


def paired(messages: Sequence[Message]) -> list[Message]:
    """The messages, in which every call has an id, and every result that of its call, if any."""
    pairing = _Pairing(call.id for message in messages for call in message.tool_calls or ())
    return [pairing.with_ids(message) for message in messages]


class _Pairing:
    """Sees the messages of a history in their order."""

    def __init__(self, given_ids: Iterable[str | None]) -> None:
        self._given = frozenset(given_ids)
        self._num_calls = 0
        self._open: list[ToolCall] = []  # have no result
        self._has_result = False  # one of those that were called last

    def with_ids(self, message: Message) -> Message:
        if message.tool_calls:
            if self._has_result:  # what has none by now will not have one
                self._open, self._has_result = [], False
            calls = [self._with_id(call) for call in message.tool_calls]
            self._open += calls
            return message.model_copy(update={"tool_calls": calls})
        if message.role != "tool":
            return message
        self._has_result = True
        call = self._called(message)
        if call is not None:
            self._open.remove(call)
        if message.tool_call_id:
            return message
        unknown = f"call_{message.name}" if message.name else None
        return message.model_copy(update={"tool_call_id": call.id if call else unknown})

    def _with_id(self, call: ToolCall) -> ToolCall:
        self._num_calls += 1
        if call.id:
            return call
        new = f"call{self._num_calls:05}"  # Mistral's templates take nine characters only
        while new in self._given:
            new += "x"
        return call.model_copy(update={"id": new})

    def _called(self, result: Message) -> ToolCall | None:
        """The call that this is the result of."""
        if result.tool_call_id:
            return next((call for call in self._open if call.id == result.tool_call_id), None)
        named = (call for call in self._open if call.function.name == result.name)
        return next(named, self._open[0] if self._open else None)
