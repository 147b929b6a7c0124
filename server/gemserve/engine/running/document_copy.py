"""Copies what passes have computed: to passes that begin alike, and to the host and back."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gemserve.engine.cache.document_cache import CachedDocument
from gemserve.engine.sequence.sequence import Sequence
from gemserve.engine.sequence.step_plan import Copy
from gemserve.model.kv import Memory


def copy_documents(copies: Iterable[Copy], memory: Memory) -> None:
    """Carry out a plan's copies."""
    for copy in copies:
        sequence, units = copy.sequence, copy.token_units
        source = memory.layers(copy.source.start, num_units=units, capacity=copy.capacity)
        start, capacity = sequence.memory.start, sequence.capacity
        target = memory.layers(start, num_units=units, capacity=capacity)
        target[:, :, : copy.count] = source[:, :, : copy.count]


class HostCopies:
    """Copies between the memory of filter passes and the host: [units, kv_heads, tokens, head_dim].

    The engine's thread must not be in a step.
    """

    def __init__(self, memory: Memory, dtype: torch.dtype) -> None:
        self._memory, self._dtype = memory, dtype
        self.dtype = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]

    def take(self, document: CachedDocument, start: int, count: int) -> memoryview:
        """A copy of some tokens of a cached document."""
        assert document.key.layer is not None, "prompts read whole are not written to disk"
        units, capacity = 2 * document.key.layer + 1, len(document.tokens)
        rows = self._memory.layers(document.span.start, num_units=units, capacity=capacity)
        part = torch.empty((units, rows.shape[1], count, rows.shape[3]), dtype=self._dtype)
        part.copy_(rows[:, :, start : start + count])
        return part.view(torch.uint8).numpy().data.cast("B")

    def put(self, sequence: Sequence, start: int, count: int, data: bytearray) -> None:
        """Write some tokens of a filter pass into its sequence's memory."""
        assert sequence.filter_layer is not None
        units, capacity = 2 * sequence.filter_layer + 1, sequence.num_read
        rows = self._memory.layers(sequence.memory.start, num_units=units, capacity=capacity)
        part = torch.frombuffer(data, dtype=self._dtype)
        shape = (units, rows.shape[1], count, rows.shape[3])
        rows[:, :, start : start + count] = part.view(shape).to(rows.device)
