"""Long texts are tokenized a few at a time, the keys in turn: each takes much memory meanwhile."""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from gemserve.errors import RequestError
from gemserve.prompting.client_text import texts_within

LONG_BYTES = 256 << 10  # a tokenizer takes some 300 bytes of memory for each character
AT_ONCE = 2
MOST_CHARS = 4 << 20  # of a text that is only tokenized, or as many as a prompt may have
_LEAST_CHARS = 16  # as which each text counts: many short ones take as long as a few long ones


class LongTexts:
    """Gives turns to requests with long texts. It is used on the event loop only."""

    def __init__(self) -> None:
        self._free = AT_ONCE
        # by tenant, who waits; the tenant that had its turn longest ago is first
        self._waiting: OrderedDict[bytes, deque[asyncio.Future[None]]] = OrderedDict()

    @asynccontextmanager
    async def turn(self, tenant: bytes, num_bytes: int) -> AsyncIterator[None]:
        """Wait for a turn to work on a text; a short one need not wait."""
        if num_bytes <= LONG_BYTES:
            yield
            return
        await self._take(tenant)
        try:
            yield
        finally:
            self._give_back()

    async def _take(self, tenant: bytes) -> None:
        if self._free:
            self._free -= 1
            return
        waiting: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(tenant, deque()).append(waiting)
        try:
            await waiting
        except asyncio.CancelledError:
            if not waiting.cancelled():  # the turn had just come
                self._give_back()
            raise

    def _give_back(self) -> None:
        while self._waiting:
            tenant, queue = self._waiting.popitem(last=False)
            waiting = queue.popleft()
            if queue:
                self._waiting[tenant] = queue
            if not waiting.done():
                waiting.set_result(None)
                return
        self._free += 1


def count_chars(value: Any) -> int:
    """Characters of all texts within a JSON value, names of members too."""
    return sum(max(_LEAST_CHARS, len(text)) for text in texts_within(value) if text)


def count_chat_chars(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> int:
    """Characters of all that a chat template gets from a client, but for the names of roles."""
    shown = [[value for name, value in each.items() if name != "role"] for each in messages]
    return count_chars([shown, tools, variables or {}])


def check_tokenized_chars(num_chars: int, limit: int, field: str) -> None:
    """Raise `RequestError` for a text that is too long to be tokenized."""
    if num_chars > limit:
        raise RequestError(
            f"{field}: has {num_chars} characters, the limit of what is tokenized is {limit}",
            param=field,
            code="body_too_large",
        )
