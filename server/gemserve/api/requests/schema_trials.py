"""Tries the schemas that are new to the server: a few at a time, beside all other work."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TypeVar

from anyio import CapacityLimiter, to_thread

from gemserve.decoding.grammar import Grammars, TrialNeeded
from gemserve.errors import SchemasBusy
from gemserve.holdings import Holdings

AT_ONCE = 4
MAX_TRIALS = 20  # that run or wait
MAX_TRIALS_OF_A_KEY = 10
_MOST_TRIALS_OF_A_REQUEST = 200  # its tools may each need one
T = TypeVar("T")


class SchemaTrials:
    """A bounded queue in front of the trials, which have threads of their own.

    So schemas that take long hold up requests with new schemas, and nothing else.
    """

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars
        self._threads = CapacityLimiter(AT_ONCE)
        self._under_way = Holdings(MAX_TRIALS)

    async def run(self, build: Callable[[], Awaitable[T]], tenant: bytes) -> T:
        """What `build` makes. The schemas that it finds to be new are tried first.

        Raises `SchemasBusy`, and what `build` raises.
        """
        for _ in range(_MOST_TRIALS_OF_A_REQUEST):
            try:
                return await build()
            except TrialNeeded as needed:
                grammar = needed.grammar
            self._check_room(tenant)
            with self._under_way.one_more(tenant):
                await to_thread.run_sync(self._grammars.try_out, grammar, limiter=self._threads)
        raise SchemasBusy("it was forgotten, for others came too fast")

    def _check_room(self, tenant: bytes) -> None:
        if self._under_way.free <= 0:
            raise SchemasBusy(f"{MAX_TRIALS} others are being tried, which is the limit")
        if tenant and self._under_way.of(tenant) >= MAX_TRIALS_OF_A_KEY:
            raise SchemasBusy(f"{MAX_TRIALS_OF_A_KEY} of this API key are, which is the limit")
