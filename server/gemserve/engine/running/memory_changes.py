"""Carries out what the memory pool has decided: moved and repacked spans, and zeros."""

from __future__ import annotations

from collections.abc import Iterable

from gemserve.engine.memory import Change, Move, Repack
from gemserve.model.kv import Memory


def apply_changes(changes: Iterable[Change], memory: Memory) -> None:
    """Carry out the pool's changes in their order."""
    for change in changes:
        if isinstance(change, Move):
            memory.move(change.source, change.target, change.size)
        elif isinstance(change, Repack):
            memory.repack(change.start, change.num_rows, change.old, change.new)
        else:
            memory.wipe(change.start, change.size)
