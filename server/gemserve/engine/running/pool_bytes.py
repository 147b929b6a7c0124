"""Moves, copies and wipes the bytes of the memory pool, as the scheduler has decided."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from gemserve.engine.memory import Change, Copied, KVPlace, Move, Repack, Stretch
from gemserve.engine.sequence.step_plan import Copy
from gemserve.model.passes.kv import KVSpan, Memory

_DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}


def apply_changes(changes: Iterable[Change], memory: Memory) -> None:
    """Carry out the pool's changes in their order."""
    for change in changes:
        if isinstance(change, Move):
            memory.move(change.source, change.target, change.size)
        elif isinstance(change, Copied):
            memory.copy(change.source, change.target, change.size)
        elif isinstance(change, Repack):
            _repack(change, memory)
        else:
            memory.wipe(change.start, change.size)


def _repack(change: Repack, memory: Memory) -> None:
    """Some rows may stay in part, or none; what lies behind them follows."""
    rows, start = change.num_rows, change.start
    if change.new:
        memory.repack(start, rows, change.old, change.new)
    if change.tail:
        memory.move(start + rows * change.old, start + rows * change.new, change.tail)


def tokens_of(stretch: Stretch, num_units: int, memory: Memory) -> torch.Tensor:
    """A view of a stretch's tokens: [num_units, kv_heads, tokens, head_dim]."""
    rows = memory.layers(stretch.start, num_units=num_units, capacity=stretch.capacity)
    return rows[:, :, stretch.first : stretch.first + stretch.count]


def pass_kv(place: KVPlace, num_units: int, memory: Memory) -> KVSpan:
    """The keys and values of a pass with `num_units` of each token, the shared ones first."""
    shared = [tokens_of(stretch, num_units, memory) for stretch in place.shared]
    return memory.pass_kv(
        place.start,
        num_units=num_units,
        capacity=place.capacity,
        shared=shared,
        room=place.room,
    )


def copy_tokens(copy: Copy, memory: Memory) -> None:
    """Carry out a plan's copy."""
    target, units = copy.target, copy.token_units
    room = memory.layers(target.start, num_units=units, capacity=target.capacity)
    done = 0
    for stretch in copy.source:
        room[:, :, done : done + stretch.count] = tokens_of(stretch, units, memory)
        done += stretch.count
    for source, into in copy.windows:
        tokens_of(into, copy.window_units, memory).copy_(
            tokens_of(source, copy.window_units, memory)
        )


class PoolCopies:
    """Copies between the pool and the host: see `reuse.disk.HostCopies`.

    On the host the tokens are [num_units, kv_heads, tokens, head_dim]. The engine's thread must not
    be in a step.
    """

    def __init__(self, memory: Memory, dtype: torch.dtype) -> None:
        self._memory, self._torch_dtype = memory, dtype
        self.dtype = _DTYPES[dtype]

    def take(
        self, stretches: Sequence[Stretch], num_units: int, start: int, count: int
    ) -> memoryview:
        """A copy of tokens start..start+count−1 of those that `stretches` have in a row."""
        parts: list[torch.Tensor] = []
        for stretch in stretches:
            part = tokens_of(stretch, num_units, self._memory)
            low, high = max(0, start), min(stretch.count, start + count)
            if low < high:
                parts.append(part[:, :, low:high])
            start -= stretch.count
        whole = torch.cat(parts, dim=2).cpu()
        assert whole.shape[2] == count
        return whole.view(torch.uint8).numpy().data.cast("B")

    def put(self, place: KVPlace, num_units: int, start: int, data: bytes | bytearray) -> None:
        """Write tokens `start`… of a pass, but those that it shares."""
        room = self._memory.layers(place.start, num_units=num_units, capacity=place.capacity)
        part = torch.frombuffer(data, dtype=self._torch_dtype)
        part = part.view(num_units, room.shape[1], -1, room.shape[3])
        start -= sum(stretch.count for stretch in place.shared)
        part = part[:, :, max(0, -start) :]
        low = max(0, start)
        room[:, :, low : low + part.shape[2]] = part.to(room.device)
