"""A cache of pieces of documents, bounded in bytes. The least recently used piece goes first."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

Key = bytes


class PieceCache:
    """All pieces have the same size. Keeps a list of changes for the reports to a router."""

    def __init__(self, piece_bytes: int, limit: int) -> None:
        self._piece_bytes = piece_bytes
        self._limit = limit
        self._keys: OrderedDict[Key, None] = OrderedDict()  # least recently used first
        self._changes: dict[Key, bool] = {}  # since `take_changes`: is it there now?

    @property
    def used(self) -> int:
        return len(self._keys) * self._piece_bytes

    def can_hold(self, num_pieces: int) -> bool:
        return num_pieces * self._piece_bytes <= self._limit

    def count(self, keys: Iterable[Key]) -> int:
        """How many of `keys` are there."""
        return sum(key in self._keys for key in keys)

    def use(self, keys: Iterable[Key]) -> int:
        """Note that `keys` are used, and return how many of them are there."""
        found = 0
        for key in keys:
            if key in self._keys:
                self._keys.move_to_end(key)
                found += 1
        return found

    def store(self, keys: Iterable[Key], available: int) -> None:
        """Store pieces in at most `available` bytes, and never in more than the limit."""
        for key in keys:
            if key not in self._keys:
                self._changes[key] = True
            self._keys[key] = None
            self._keys.move_to_end(key)
        self.shrink(available)

    def shrink(self, available: int) -> None:
        """Drop pieces until the others are in at most `available` bytes."""
        while self._keys and self.used > min(self._limit, available):
            key, _ = self._keys.popitem(last=False)
            self._changes[key] = False

    def take_changes(self) -> tuple[list[Key], list[Key]]:
        """Pieces stored and dropped since the last call."""
        changes, self._changes = self._changes, {}
        stored = [key for key, is_there in changes.items() if is_there]
        return stored, [key for key, is_there in changes.items() if not is_there]
