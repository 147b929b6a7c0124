"""Carries out what the memory pool has decided: moves of spans, and zeros where one was private."""

from __future__ import annotations

from collections.abc import Iterable

from gemserve.engine.memory import Move, Wipe
from gemserve.model.kv import Memory


def apply_changes(changes: Iterable[Move | Wipe], memory: Memory) -> None:
    """Carry out the pool's changes in their order."""
    for change in changes:
        if isinstance(change, Move):
            memory.move(change.source, change.target, change.size)
        else:
            memory.wipe(change.start, change.size)
