"""Gives filter passes that begin what earlier ones have computed of the same tokens."""

from __future__ import annotations

from collections.abc import Iterable

from gemserve.engine.step_plan import Copy
from gemserve.model.kv import Memory


def copy_documents(copies: Iterable[Copy], memory: Memory) -> None:
    """Carry out a plan's copies: keys and values of the lower layers, keys of the filter layer."""
    for copy in copies:
        sequence, layer, count = copy.sequence, copy.sequence.filter_layer, copy.count
        assert layer is not None, "only filter passes take over documents"
        source, target = copy.source.start, sequence.memory.start
        theirs, ours = copy.capacity, sequence.num_read
        lower = memory.kv(target, num_layers=layer, capacity=ours)
        lower.take(memory.kv(source, num_layers=layer, capacity=theirs), count)
        keys = memory.keys(source + 2 * layer * theirs, theirs)
        memory.keys(target + 2 * layer * ours, ours)[:, :count] = keys[:, :count]
