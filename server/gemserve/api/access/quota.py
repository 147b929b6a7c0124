"""What one API key may use: requests and tokens in a minute, and choices at the same time."""

from __future__ import annotations

import math
import time
from bisect import insort
from collections import deque
from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field

from gemserve.contract.events import Event, Finished, TextDelta
from gemserve.errors import QuotaExceeded, RequestError

MINUTE_S = 60.0
_TOO_MANY = "concurrency_limit_exceeded"


@dataclass(slots=True)
class _Usage:
    running: int = 0  # choices: a request with n = 8 is as much work as eight requests
    entered_s: deque[float] = field(default_factory=deque)  # of the last minute, oldest first
    # when tokens were used and how many, of the last minute, oldest first; and their sum
    charges: deque[tuple[float, int]] = field(default_factory=deque)
    tokens: int = 0


class Quota:
    """Counts the requests of each key. A limit that is None does not apply.

    It is used on the event loop only, so it needs no lock.
    """

    def __init__(
        self,
        *,
        requests_per_minute: int | None,
        concurrency_per_key: int | None,
        tokens_per_minute: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_minute = requests_per_minute
        self._at_once = concurrency_per_key
        self._most_tokens = tokens_per_minute
        self._clock = clock
        self._uses: dict[bytes, _Usage] = {}  # one for every key that was ever valid and used

    def enter(self, key: bytes) -> None:
        """Count a request, which must `leave` later. Raises `QuotaExceeded`, counting none."""
        use = self._uses.setdefault(key, _Usage())
        if self._at_once is not None and use.running >= self._at_once:
            raise QuotaExceeded(
                f"This API key has {use.running} requests under way, the limit is {self._at_once}.",
                code=_TOO_MANY,
                retry_after_s=1,
            )
        now_s = self._clock()
        if self._most_tokens is not None:
            self._check_tokens(use, self._most_tokens, now_s)
        if self._per_minute is not None:
            while use.entered_s and now_s - use.entered_s[0] >= MINUTE_S:
                use.entered_s.popleft()
            if len(use.entered_s) >= self._per_minute:
                raise QuotaExceeded(
                    f"This API key has sent {self._per_minute} requests within a minute, which is "
                    "the limit.",
                    code="rate_limit_exceeded",
                    retry_after_s=max(1, math.ceil(use.entered_s[0] + MINUTE_S - now_s)),
                )
            use.entered_s.append(now_s)
        use.running += 1

    def add_choices(self, key: bytes, count: int) -> None:
        """Count further choices of a request that has entered.

        Raises `QuotaExceeded`, counting none, and `RequestError` if they would never be allowed.
        """
        use, limit = self._uses[key], self._at_once
        if limit is not None and count + 1 > limit:
            raise RequestError(
                f"n: {count + 1} choices; this API key may have {limit} under way at once",
                param="n",
            )
        if limit is not None and use.running + count > limit:
            raise QuotaExceeded(
                f"This API key has {use.running - 1} requests under way, each choice counted, and "
                f"asks for {count + 1} more; the limit is {limit}.",
                code=_TOO_MANY,
                retry_after_s=1,
            )
        use.running += count

    def charge(self, key: bytes, tokens: int, age_s: float = 0.0) -> None:
        """Count tokens that a request has used. They are not refused: its next request is.

        Fewer than none are given back, of what was charged `age_s` ago: both are forgotten at once.
        """
        if self._most_tokens is not None and age_s < MINUTE_S:
            use = self._uses[key]
            insort(use.charges, (self._clock() - age_s, tokens))
            use.tokens += tokens

    @staticmethod
    def _check_tokens(use: _Usage, limit: int, now_s: float) -> None:
        while use.charges and now_s - use.charges[0][0] >= MINUTE_S:
            use.tokens -= use.charges.popleft()[1]
        if use.tokens < limit:
            return
        left, ends_s = use.tokens, now_s
        for used_s, tokens in use.charges:
            if left >= limit:
                left, ends_s = left - tokens, used_s + MINUTE_S
        raise QuotaExceeded(
            f"This API key has used {use.tokens} tokens within a minute, the limit is {limit}.",
            code="token_limit_exceeded",
            retry_after_s=max(1, math.ceil(ends_s - now_s)),
        )

    def leave(self, key: bytes, choices: int = 1) -> None:
        use = self._uses[key]
        use.running -= choices
        assert use.running >= 0


class QuotaPlace:
    """What one request takes of its key's quota."""

    def __init__(self, quota: Quota, key: bytes) -> None:
        """Raises `QuotaExceeded`."""
        quota.enter(key)
        self._quota, self._key, self._choices = quota, key, 1

    def add_choices(self, count: int) -> None:
        """Take more: see `Quota.add_choices`."""
        self._quota.add_choices(self._key, count)
        self._choices += count

    def charge(self, tokens: int, age_s: float = 0.0) -> None:
        """Count tokens that the request has used, also after it has left: see `Quota.charge`."""
        self._quota.charge(self._key, tokens, age_s)

    def hand_over(self) -> QuotaPlace:
        """Give all that it takes to a new place, for work that goes on after the reply."""
        taker = copy(self)
        self._choices = 0
        return taker

    def leave(self) -> None:
        """Give back everything. Idempotent."""
        self._quota.leave(self._key, self._choices)
        self._choices = 0


class TokenCharges:
    """Charges the tokens of one choice's answer to its key, when the answer has ended.

    `prompt_tokens` have been charged, and are not if nothing of them was read.
    """

    def __init__(self, place: QuotaPlace, prompt_tokens: int) -> None:
        self._place, self._prompt_tokens, self._count = place, prompt_tokens, 0
        self._charged_s = time.monotonic()

    def see(self, event: Event) -> None:
        if isinstance(event, TextDelta):
            self._count += len(event.token_ids)
        elif isinstance(event, Finished) and event.late == "not_begun":
            self._place.charge(-self._prompt_tokens, time.monotonic() - self._charged_s)

    def close(self) -> None:
        if self._count:
            self._place.charge(self._count)
        self._count = 0
