"""How many tokens wait, and how long what is queued and running will take.

For `Retry-After`, and to refuse what would be too much or wait too long.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from weakref import WeakSet

from gemserve.api.access.work_speed import Work, WorkSpeed
from gemserve.contract.events import Event, Filtered, Finished, TextDelta
from gemserve.contract.requests import Request
from gemserve.errors import QueueFull

LEAST_S, MOST_S = 1, 60
_BYTES_PER_TOKEN = 4  # of a body that is not tokenized yet
_USUAL_ANSWER = 256.0  # tokens, before any answer has ended


class Backlog:
    """Counts the tokens that are still to be read and drawn, and learns how long they take.

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
        # what is being parsed, by tenant: tokens of prompts, and how many requests
        self._expected: Counter[bytes] = Counter()
        self._parsed: Counter[bytes] = Counter()
        self._looked_s = 0.0
        self._speed = WorkSpeed()
        self._open_s = 0.0  # under load, since tokens were last read or drawn
        # since a prompt was last read, while others waited, without what was drawn meanwhile
        self._reading_s = 0.0
        self._answers = 0
        self._answer_tokens = 0.0  # of an answer, on average

    def enter(self, request: Request, *, is_further_choice: bool = False) -> BacklogJob:
        """Count a request until its job is closed.

        `is_further_choice`: its prompt is that of the one before, and is read for both.
        """
        self._pass_time()
        if not any(job.is_unread for job in self._jobs):
            self._reading_s = 0.0
        job = BacklogJob(self, request, has_prompt=not is_further_choice)
        self._jobs.add(job)
        return job

    @contextmanager
    def expecting(self, tenant: bytes, num_bytes: int) -> Iterator[None]:
        """Count a request whose body has so many bytes while it is parsed and tokenized.

        Else all that come meanwhile would find room, and none of them would be answered in time.
        """
        self._expected[tenant] += num_bytes // _BYTES_PER_TOKEN
        self._parsed[tenant] += 1
        try:
            yield
        finally:
            self._expected[tenant] -= num_bytes // _BYTES_PER_TOKEN
            self._parsed[tenant] -= 1
            if not self._parsed[tenant]:
                del self._expected[tenant], self._parsed[tenant]

    def check_room(self, tenant: bytes, num_tokens: int = 1) -> None:
        """Raise `QueueFull` if prompts of so many tokens do not fit beside those that wait.

        A tenant of which none waits may have one request of any length.
        """
        waiting = sum(job.prompt_tokens for job in self._jobs if job.is_unread)
        is_first = not any(job.is_unread for job in self._jobs if job.tenant == tenant)
        if not is_first and waiting + num_tokens > self._max_tokens:
            raise QueueFull(waiting=waiting, limit=self._max_tokens, kind="tokens of prompts")

    @property
    def tokens_left(self) -> int:
        """About how many tokens are still to be read and drawn."""
        expected = self._answer_tokens if self._answers else 0.0
        unread = sum(job.prompt_tokens for job in self._jobs if job.is_unread)
        return round(unread + sum(job.answer_left(expected) for job in self._jobs))

    def retry_after_s(self) -> int:
        """When what is queued and running now will probably be done: 1 to 60 seconds."""
        return in_header(sum(self._seconds_left().values()))

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
        """What the requests of each tenant will take; nothing while the speed is not known."""
        self._pass_time()
        speed = self._speed
        if not speed.is_known:
            return {}
        expected = self._answer_tokens if self._answers else _USUAL_ANSWER
        prompts, tokens = Counter(self._parsed), Counter[bytes](self._expected)
        answers = {tenant: expected * count for tenant, count in self._parsed.items()}
        longest = 0.0
        for job in self._jobs:  # thousands may wait
            tenant = job.tenant
            answers[tenant] = answers.get(tenant, 0.0) + job.answer_left(expected)
            if job.is_unread:
                prompts[tenant] += 1
                tokens[tenant] += job.prompt_tokens
                longest = max(longest, job.prompt_tokens)
        left_s = {
            tenant: speed.seconds(Work(prompts[tenant], tokens[tenant], answer_tokens))
            for tenant, answer_tokens in answers.items()
        }
        # A prompt counts as read at its end. Until then it is read as fast as others were, or, if
        # it should be read by now, more slowly. More than one is not read, or it would have ended.
        reading_s = self._reading_s if longest else 0.0
        read_s = min(speed.seconds(Work(1, longest)), reading_s)
        slower = (speed.busy_s + reading_s) / (speed.busy_s + read_s)
        share = 1.0 - read_s / sum(left_s.values()) if read_s else 1.0
        return {tenant: seconds * share * slower for tenant, seconds in left_s.items()}

    def add_done(self, work: Work) -> None:
        """Count what was read or drawn."""
        self._pass_time()
        if work.prompts:
            self._reading_s = 0.0
        elif self._speed.is_known:
            self._reading_s = max(0.0, self._reading_s - self._speed.seconds(work))
        self._speed.note(work, self._open_s)
        self._open_s = 0.0

    def add_lost(self, work: Work) -> None:
        """Count that the reading of a prompt has ended before its end.

        Else its time would count as what is read of others.
        """
        self._pass_time()
        if not self._speed.is_known:
            return
        lost_s = min(self._reading_s, self._speed.seconds(work))
        self._reading_s -= lost_s
        self._speed.forget(max(0.0, lost_s - self._open_s))
        self._open_s = max(0.0, self._open_s - lost_s)

    def add_answer(self, tokens: int) -> None:
        """Note the length of a whole answer."""
        self._answers += 1
        self._answer_tokens += (tokens - self._answer_tokens) / min(self._answers, 20)

    def leave(self, job: BacklogJob) -> None:
        self._pass_time()
        self._jobs.discard(job)
        if not self._jobs:
            self._open_s = 0.0  # what was cancelled says nothing about the rate

    def _pass_time(self) -> None:
        """Count the time since the last look, if there was something to do."""
        now_s = self._clock()
        if self._jobs:
            self._open_s += now_s - self._looked_s
            self._reading_s += now_s - self._looked_s
        self._looked_s = now_s


def in_header(seconds: float) -> int:
    """What `Retry-After` says of a wait of so many seconds."""
    return max(LEAST_S, round(min(seconds, MOST_S)))


class BacklogJob:
    """One request in the backlog. It must see events when they come, not when a client reads."""

    def __init__(self, backlog: Backlog, request: Request, *, has_prompt: bool) -> None:
        """`has_prompt`: else another job counts its prompt."""
        self.tenant = request.tenant
        self.is_unread = has_prompt
        self.prompt_tokens = len(request.prompt_ids)
        self._backlog = backlog
        self._has_answer = not (request.selects_only or request.ends_when_read)
        self._max_tokens = request.sampling.max_tokens if self._has_answer else 0
        self._drawn = 0
        self._is_closed = False

    def answer_left(self, expected: float) -> float:
        """Tokens to draw, if the answer is as long as expected."""
        return max(0.0, min(self._max_tokens, expected) - self._drawn)

    def see(self, event: Event) -> None:
        if self._is_closed:
            return  # the engine has not heard of it yet
        if isinstance(event, Filtered):
            # one that was not applied has an answer from the whole prompt, which is read now
            is_over = event.report.applied or not self._has_answer
            if event.report.filter_ms and is_over:
                self._note_read()
        elif isinstance(event, TextDelta):
            self._note_read()
            self._drawn += len(event.token_ids)
            self._backlog.add_done(Work(answer_tokens=len(event.token_ids)))
        elif isinstance(event, Finished):
            if event.reason in ("abort", "error"):
                if self.is_unread and not event.is_unread:
                    self._backlog.add_lost(Work(1, self.prompt_tokens))
            elif self._has_answer or event.segments_read or event.vectors:
                self._note_read()
            if self._has_answer and event.reason not in ("abort", "error"):
                self._backlog.add_answer(event.completion_tokens)
            self.close()

    def _note_read(self) -> None:
        if self.is_unread:
            self.is_unread = False
            self._backlog.add_done(Work(1, self.prompt_tokens))

    def close(self) -> None:
        """Nobody waits for the request any more. Idempotent."""
        self._is_closed = True
        self._backlog.leave(self)
