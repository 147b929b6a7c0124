"""What a request holds of memory that all share, and of which one key leaves the others a part."""

from __future__ import annotations

from gemserve.holdings import Holdings, may_hold

FREE_BYTES = 64 << 10  # of each request, so that small ones pass when the memory is taken


class HeldBytes:
    """What one request takes of the memory, in bytes."""

    def __init__(self, memory: Holdings, tenant: bytes = b"") -> None:
        self._memory = memory
        self._tenant = tenant
        self._held = 0

    def grow(self, size: int) -> bool:
        """Take what a request of `size` bytes needs. False: there is too little left.

        A request that is alone may have any size.
        """
        more = max(0, size - FREE_BYTES) - self._held
        left, own = self._memory.free - more, self._memory.of(self._tenant)
        is_only_one, is_alone = own == self._held, self._memory.used == self._held
        if more and left < 0 and not is_alone:
            return False
        if more and self._tenant and not is_only_one and not may_hold(own + more, left):
            return False
        self._take(more)
        return True

    def release(self) -> None:
        """Give everything back. Idempotent."""
        self._take(-self._held)

    def _take(self, more: int) -> None:
        self._memory.take(self._tenant, more)
        self._held += more
