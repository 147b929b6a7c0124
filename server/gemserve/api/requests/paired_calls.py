"""Ids for the calls of a history that have none, and for the results of calls.

What OpenAI had before tools knows only names, and some clients send neither ids nor names. A result
without an id belongs to the first call in front of it that has its name, or the first at all, and
that has no result yet.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
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
        self._open: OrderedDict[str, None] = OrderedDict()  # the ids of calls without a result
        self._named: defaultdict[str | None, deque[str]] = defaultdict(deque)  # and of others
        self._has_result = False  # has one of those that were called last?

    def with_ids(self, message: Message) -> Message:
        if message.tool_calls:
            if self._has_result:  # what has none by now will not have one
                self._open.clear()
                self._named.clear()
                self._has_result = False
            calls = [self._with_id(call) for call in message.tool_calls]
            return message.model_copy(update={"tool_calls": calls})
        if message.role != "tool":
            return message
        self._has_result = True
        return message.model_copy(update={"tool_call_id": self._id_for(message)})

    def _with_id(self, call: ToolCall) -> ToolCall:
        self._num_calls += 1
        used = call.id or f"call{self._num_calls:05}"  # Mistral's templates take nine characters
        while not call.id and used in self._given:
            used += "x"
        self._open[used] = None
        self._named[call.function.name].append(used)
        return call if call.id else call.model_copy(update={"id": used})

    def _id_for(self, result: Message) -> str | None:
        """The id of the call that this is the result of."""
        named = self._named[result.name]
        while named and named[0] not in self._open:
            named.popleft()
        found = result.tool_call_id or (named[0] if named else next(iter(self._open), None))
        if found is None:
            return f"call_{result.name}" if result.name else None
        self._open.pop(found, None)
        return found
