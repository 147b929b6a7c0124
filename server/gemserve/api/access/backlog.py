"""How many tokens wait, and how long what is queued and running will take.

For `Retry-After`, and to refuse what would be too much or wait too long.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

from gemserve.contract.events import Event, Filtered, Finished, TextDelta
from gemserve.contract.requests import Request
from gemserve.errors import QueueFull

LEAST_S, MOST_S = 1, 60
_NEW_SHARE = 0.05  # of the newest prompt in their average
_HALF_LIFE_S = 30.0  # of what is known about the rate, in time under load


class Backlog:
    """Counts the tokens that are still to be read and drawn, and those of each second.

    It is used on the event loop only, so it needs no lock.
    """

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, max_tokens: int = 1 << 62
    ) -> None:
        """`max_tokens`: of prompts that are not read yet. One prompt alone may have more."""
        self._clock = clock
        self._max_tokens = max_tokens
        # weak: a request whose reading never begins is not closed either
        self._jobs: WeakSet[BacklogJob] = WeakSet()
        self._busy_since_s = 0.0
        self._done_tokens = 0.0
        self._busy_s = 0.0
        self._prompt_tokens = 0.0  # of a prompt, on average
        self._answers = 0
        self._answer_tokens = 0.0  # of an answer, on average

    def enter(self, request: Request) -> BacklogJob:
        """Count a request until its job is closed."""
        if not self._jobs:
            self._busy_since_s = self._clock()
        num_tokens = len(request.prompt_ids)
        self._prompt_tokens += (num_tokens - self._prompt_tokens) * _NEW_SHARE
        job = BacklogJob(self, request.tenant, num_tokens, request.sampling.max_tokens)
        self._jobs.add(job)
        return job

    @contextmanager
    def expecting(self, tenant: bytes) -> Iterator[None]:
        """Count a request of usual length while it is parsed and tokenized.

        Else all that come meanwhile would find room, and none of them would be answered in time.
        """
        if not self._jobs:
            self._busy_since_s = self._clock()
        expected = BacklogJob(self, tenant, round(self._prompt_tokens), round(self._answer_tokens))
        self._jobs.add(expected)
        try:
            yield
        finally:
            self.leave(expected)

    def check_room(self, num_tokens: int = 1) -> None:
        """Raise `QueueFull` if prompts of so many tokens do not fit beside those that wait."""
        waiting = sum(job.tokens_unread for job in self._jobs)
        if waiting and waiting + num_tokens > self._max_tokens:
            raise QueueFull(waiting=waiting, limit=self._max_tokens, kind="tokens of prompts")

    @property
    def tokens_left(self) -> int:
        """About how many tokens are still to be read and drawn."""
        expected = self._answer_tokens if self._answers else 0.0
        return round(sum(job.tokens_left(expected) for job in self._jobs))

    def retry_after_s(self) -> int:
        """When what is queued and running now will probably be done: 1 to 60 seconds."""
        seconds = sum(self._seconds_left().values())
        return max(LEAST_S, math.ceil(min(seconds, MOST_S)))

    def is_alone(self, tenant: bytes) -> bool:
        """Are there no requests but of this tenant?"""
        return all(job.tenant == tenant for job in self._jobs)

    def wait_s(self, tenant: bytes) -> float:
        """About how long a further request of `tenant` would wait for its first token.

        Tenants have the server in turn. So it waits for its own tenant's requests, during which
        every other tenant gets as much as its own. 0 if the tenant has none.
        """
        left = self._seconds_left()
        own = left.get(tenant, 0.0)
        return sum(min(seconds, own) for seconds in left.values())

    def _seconds_left(self) -> dict[bytes, float]:
        """What the requests of each tenant will take; nothing while the rate is not known."""
        self._pass_time()
        if self._done_tokens <= 0 or self._busy_s <= 0:
            return {}
        expected = self._answer_tokens if self._answers else math.inf
        left: dict[bytes, float] = {}
        for job in self._jobs:
            seconds = job.tokens_left(expected) * self._busy_s / self._done_tokens
            left[job.tenant] = left.get(job.tenant, 0.0) + seconds
        return left

    def add_done(self, tokens: int) -> None:
        self._pass_time()
        self._done_tokens += tokens

    def add_answer(self, tokens: int) -> None:
        """Note the length of a whole answer."""
        self._answers += 1
        self._answer_tokens += (tokens - self._answer_tokens) / min(self._answers, 20)

    def leave(self, job: BacklogJob) -> None:
        self._pass_time()
        self._jobs.discard(job)

    def _pass_time(self) -> None:
        """Count the time since the last look, if there was something to do, and forget the past."""
        now_s = self._clock()
        if self._jobs:
            passed_s = now_s - self._busy_since_s
            share = 0.5 ** (passed_s / _HALF_LIFE_S)
            self._busy_s = self._busy_s * share + passed_s
            self._done_tokens *= share
        self._busy_since_s = now_s


class BacklogJob:
    """One request in the backlog."""

    def __init__(
        self, backlog: Backlog, tenant: bytes, prompt_tokens: int, max_tokens: int
    ) -> None:
        self.tenant = tenant
        self._backlog = backlog
        self._prompt_tokens = prompt_tokens
        self._max_tokens = max_tokens
        self._is_read = False
        self._drawn = 0

    @property
    def tokens_unread(self) -> int:
        """The prompt's tokens, until all of them are read."""
        return 0 if self._is_read else self._prompt_tokens

    def tokens_left(self, expected_answer: float) -> float:
        """Tokens to read and to draw, if the answer is as long as expected."""
        answer = max(0.0, min(self._max_tokens, expected_answer) - self._drawn)
        return answer + self.tokens_unread

    def see(self, event: Event) -> None:
        if isinstance(event, Filtered):
            self._is_read = True
            self._backlog.add_done(self._prompt_tokens)
        elif isinstance(event, TextDelta):
            self._drawn += len(event.token_ids)
            self._backlog.add_done(len(event.token_ids))
        elif isinstance(event, Finished):
            if event.segments_read is not None:  # for another replica, which answers
                self._backlog.add_done(self._prompt_tokens)
            elif event.reason not in ("abort", "error"):
                self._backlog.add_answer(event.completion_tokens)
            self.close()

    def close(self) -> None:
        """The request is no longer read. Idempotent."""
        self._backlog.leave(self)
