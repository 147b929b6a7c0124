"""Memory that all requests share, and of which one key leaves the others a part."""

from __future__ import annotations

from collections import Counter

FREE_BYTES = 64 << 10  # of each request, so that small ones pass when the memory is taken


class SharedMemory:
    """Counts the bytes of all requests. It is used on the event loop only, so it needs no lock."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.used = 0
        self.used_by: Counter[bytes] = Counter()  # tenants


class HeldBytes:
    """What one request takes of the memory."""

    def __init__(self, memory: SharedMemory, tenant: bytes = b"") -> None:
        self._memory = memory
        self._tenant = tenant
        self._held = 0

    def grow(self, size: int) -> bool:
        """Take what a request of `size` bytes needs. False: there is too little left.

        A request that is alone may have any size.
        """
        more = max(0, size - FREE_BYTES) - self._held
        left = self._memory.limit - self._memory.used - more
        own = self._memory.used_by[self._tenant] + more
        is_only_one = own == self._held + more  # of this key
        is_alone = self._memory.used == self._held
        if more and left < 0 and not is_alone:
            return False
        if more and self._tenant and not is_only_one and own > 3 * left:
            return False
        self._take(more)
        return True

    def release(self) -> None:
        """Give everything back. Idempotent."""
        self._take(-self._held)

    def _take(self, more: int) -> None:
        memory = self._memory
        memory.used += more
        memory.used_by[self._tenant] += more
        if not memory.used_by[self._tenant]:
            del memory.used_by[self._tenant]
        self._held += more
