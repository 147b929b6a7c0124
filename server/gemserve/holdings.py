"""How what all tenants share is divided: slots, places in queues, memory, and turns.

Tenants are the API keys of requests; b"" is the tenant of all where a server has no keys. A tenant
may hold all that is free while it holds nothing. Beside what it holds already it may take more as
long as it leaves `MOST_PER_FREE` to one for the others: so one alone leaves a quarter, and whoever
comes next is neither refused nor waits for a long answer.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

MOST_PER_FREE = 3


def may_hold(count: int, num_free: int) -> bool:
    """May one tenant hold `count` while `num_free` others are free?"""
    return count <= MOST_PER_FREE * num_free


class Holdings:
    """Counts what each tenant holds of something that has `capacity`.

    It knows no locks: one thread uses it.
    """

    def __init__(self, capacity: int = sys.maxsize) -> None:
        self.capacity = capacity
        self._held: Counter[bytes] = Counter()

    @property
    def used(self) -> int:
        return self._held.total()

    @property
    def free(self) -> int:
        return self.capacity - self.used

    def of(self, tenant: bytes) -> int:
        return self._held[tenant]

    def may_take(self, tenant: bytes, size: int = 1) -> bool:
        """May the tenant take `size` more, for all that the others are left with?

        One that holds nothing may, and so may all where there are no keys. Whether so much is free
        is another question.
        """
        if not tenant or not self._held[tenant]:
            return True
        return may_hold(self._held[tenant] + size, self.free - size)

    def take(self, tenant: bytes, size: int = 1) -> None:
        self._held[tenant] += size
        if not self._held[tenant]:
            del self._held[tenant]

    def give_back(self, tenant: bytes, size: int = 1) -> None:
        self.take(tenant, -size)

    @contextmanager
    def one_more(self, tenant: bytes) -> Iterator[None]:
        """The tenant holds one more meanwhile."""
        self.take(tenant)
        try:
            yield
        finally:
            self.give_back(tenant)
