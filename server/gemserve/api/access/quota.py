"""How many requests one API key may send in a minute, and how many choices it may have at once."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from gemserve.errors import QuotaExceeded, RequestError

MINUTE_S = 60.0
_TOO_MANY = "concurrency_limit_exceeded"


@dataclass(slots=True)
class _Usage:
    running: int = 0  # choices: a request with n = 8 is as much work as eight requests
    entered_s: deque[float] = field(default_factory=deque)  # of the last minute, oldest first


class Quota:
    """Counts the requests of each key. A limit that is None does not apply.

    It is used on the event loop only, so it needs no lock.
    """

    def __init__(
        self,
        *,
        requests_per_minute: int | None,
        concurrency_per_key: int | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._per_minute = requests_per_minute
        self._at_once = concurrency_per_key
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
        if self._per_minute is not None:
            now_s = self._clock()
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

    def leave(self, key: bytes, choices: int = 1) -> None:
        use = self._uses[key]
        use.running -= choices
        assert use.running >= 0


class Place:
    """What one request takes of its key's quota."""

    def __init__(self, quota: Quota, key: bytes) -> None:
        """Raises `QuotaExceeded`."""
        quota.enter(key)
        self._quota, self._key, self._choices = quota, key, 1

    def add_choices(self, count: int) -> None:
        """Take more: see `Quota.add_choices`."""
        self._quota.add_choices(self._key, count)
        self._choices += count

    def leave(self) -> None:
        """Give back everything. Idempotent."""
        self._quota.leave(self._key, self._choices)
        self._choices = 0
