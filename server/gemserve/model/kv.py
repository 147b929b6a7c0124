"""The keys and values of one sequence in the layers of its pass, as views of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gemserve.cost import ModelShape
from gemserve.model.recurrent_state import SequenceState
from gemserve_kernels import Backend, KVTable

_PLACE = 5  # numbers that locate a sequence: a row of `KVTable.table`
# numbers of a sequence in a decode step: also its newest token's id and position
NUMBERS = _PLACE + 2


class KVSpan:
    """Keys and values of one sequence, in units of one token's keys, or values, in one layer.

    `memory`: flat, `num_units` · `capacity` units: keys and values of layer 0, of layer 1, and so
    on, without the layers that have none. An odd number of units is that of a filter pass, which
    ends with the keys of its filter layer. Its owner decides how long the memory lives.

    `shared`: the tokens before those, which other passes have computed and nobody writes to. Each
    is [num_units, kv_heads, tokens, head_dim].
    """

    def __init__(
        self,
        memory: torch.Tensor,
        shape: ModelShape,
        *,
        num_units: int,
        capacity: int,
        shared: Sequence[torch.Tensor] = (),
    ) -> None:
        self._data = memory.view(num_units, shape.num_kv_heads, capacity, shape.head_dim)
        self._rows = self._data.unbind(0)
        self._shared = tuple(shared)
        self._num_shared = sum(part.shape[2] for part in shared)
        self._kv_index = shape.kv_index
        self._start, self._row_bytes = memory.data_ptr(), shape.head_dim * memory.element_size()

    @property
    def head_sizes(self) -> tuple[int, int]:
        """How many key heads there are in each layer, and their size."""
        return self._data.shape[1], self._data.shape[3]

    def write(self, layer: int, start: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store [kv_heads, tokens, head_dim] keys and values at positions `start`…"""
        row = 2 * self._kv_index(layer)
        self._store(row, start, key)
        self._store(row + 1, start, value)

    def write_keys(self, layer: int, start: int, key: torch.Tensor) -> None:
        """Store the keys of a pass's filter layer, of which it keeps no values."""
        self._store(2 * self._kv_index(layer), start, key)

    def parts(self, layer: int, stop: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Views of keys and values 0..stop−1, [kv_heads, tokens, head_dim] each, in their order.

        They are several if tokens are shared. Those without tokens are left out.
        """
        row = 2 * self._kv_index(layer)
        keys, values = self._views(row, stop), self._views(row + 1, stop)
        return list(zip(keys, values, strict=True))

    def read(self, layer: int, stop: int, first: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values first..stop−1, each [kv_heads, tokens, head_dim]: views, or a copy.

        They are copied if the tokens are not all in one place.
        """
        row = 2 * self._kv_index(layer)
        return self._joined(row, first, stop), self._joined(row + 1, first, stop)

    def keys(self, layer: int, stop: int) -> torch.Tensor:
        """Keys 0..stop−1: see `read`."""
        return self._joined(2 * self._kv_index(layer), 0, stop)

    def pack(self, source: KVSpan, chosen: torch.Tensor, backend: Backend) -> None:
        """Copy the chosen positions [layers, kv_heads, kept] of `source` to 0..kept−1 of this span.

        Both have keys and values of all layers, and share nothing. They may begin at the same place
        in memory. The pieces are then copied in an order in which none is overwritten before it is
        read.
        """
        pairs, of_source = (span._data.unflatten(0, (-1, 2)) for span in (self, source))
        if not self._overlaps(source):
            backend.gather(of_source, pairs, chosen)
            return
        layers, kept = chosen.shape[0], chosen.shape[2]
        index = chosen.unsqueeze(-1).expand(-1, -1, -1, pairs.shape[-1])
        is_growing = pairs.shape[3] > of_source.shape[3]
        pieces = [(layer, side) for layer in range(layers) for side in (0, 1)]
        for layer, side in reversed(pieces) if is_growing else pieces:
            piece = of_source[layer, side].gather(1, index[layer])
            pairs[layer, side, :, :kept] = piece

    def rows_of(self, slot: int, base: torch.Tensor) -> tuple[int, int, int, int]:
        """Where `slot` is in `base` [rows, head_dim], the memory that this span is part of.

        Returns the row of the first layer's first key head, and the steps to the next head, to
        values, and to the next layer.
        """
        assert not self._shared, "a decode step reads one place for each sequence"
        _, heads, capacity, _ = self._data.shape
        first = (self._start - base.data_ptr()) // self._row_bytes
        return first + slot, capacity, heads * capacity, 2 * heads * capacity

    def _store(self, row: int, start: int, numbers: torch.Tensor) -> None:
        low = start - self._num_shared
        assert low >= 0, "shared tokens are not written to"
        self._rows[row][:, low : low + numbers.shape[1]] = numbers

    def _views(self, row: int, stop: int, first: int = 0) -> list[torch.Tensor]:
        views: list[torch.Tensor] = []
        begin = 0
        for part in (*(part[row] for part in self._shared), self._rows[row]):
            low, high = max(first, begin), min(stop, begin + part.shape[1])
            if low < high:
                views.append(part[:, low - begin : high - begin])
            begin += part.shape[1]
        return views

    def _joined(self, row: int, first: int, stop: int) -> torch.Tensor:
        if not self._shared:
            return self._rows[row][:, first:stop]
        views = self._views(row, stop, first)
        return views[0] if len(views) == 1 else torch.cat(views, dim=1)

    def _overlaps(self, other: KVSpan) -> bool:
        (low, high), (other_low, other_high) = (
            (span._start, span._start + span._data.numel() * span._data.element_size())
            for span in (self, other)
        )
        return low < other_high and other_low < high


class ReadOnlyKV(KVSpan):
    """The same keys and values; a pass that reads them stores nothing."""

    def __init__(self, source: KVSpan) -> None:
        self.__dict__.update(source.__dict__)

    def _store(self, row: int, start: int, numbers: torch.Tensor) -> None:
        pass


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """A decode step as the device sees it. `ids`, `positions`: [1, sequences], int64."""

    ids: torch.Tensor
    positions: torch.Tensor
    spans: KVTable

    @classmethod
    def over(cls, numbers: torch.Tensor, memory: Memory, longest: int) -> DecodeStep:
        """Views of `numbers`, in the layout of `DecodeBatch.numbers`.

        `longest`: as in `KVTable`.
        """
        size = len(numbers) // NUMBERS
        table, ids, positions = numbers.split([_PLACE * size, size, size])
        spans = KVTable(
            rows=memory.rows,
            table=table.view(size, _PLACE),
            kv_heads=memory.num_kv_heads,
            longest=longest,
        )
        return cls(ids=ids[None], positions=positions[None], spans=spans)


class DecodeBatch:
    """One new token of each of several sequences: where K and V go, and what it sees.

    `slots`: the index of each sequence's new token in its span. `positions`: its position in the
    text, which is larger after an eviction. All spans are in `memory`. `longest`: the number of
    tokens of the longest sequence, with its new one. `states`: the sequences' recurrent states, if
    the model keeps any.
    """

    def __init__(
        self,
        memory: Memory,
        spans: Sequence[KVSpan],
        *,
        slots: Sequence[int],
        positions: Sequence[int],
        states: Sequence[SequenceState] = (),
    ) -> None:
        self.memory = memory
        self.positions = positions
        self.states = states
        self.longest = max(slots) + 1
        rows = memory.rows
        self._places: list[int] = []
        for span, slot in zip(spans, slots, strict=True):
            self._places += (*span.rows_of(0, rows), slot + 1)

    def numbers(
        self, ids: Sequence[int], positions: Sequence[int], size: int | None = None
    ) -> list[int]:
        """All numbers that the device needs, in one transfer. `DecodeStep.over` splits them.

        The batch is filled up to `size` with empty sequences.
        """
        blank = [0] * (0 if size is None else size - len(ids))
        return [*self._places, *blank * _PLACE, *ids, *blank, *positions, *blank]


class Memory:
    """The bytes behind a pool of units; one unit holds one token's K or V in one layer."""

    def __init__(
        self, num_units: int, shape: ModelShape, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._shape = shape
        self._width = shape.num_kv_heads * shape.head_dim
        self._flat = torch.empty(num_units * self._width, dtype=dtype, device=device)

    @property
    def num_kv_heads(self) -> int:
        return self._shape.num_kv_heads

    @property
    def rows(self) -> torch.Tensor:
        """The whole memory as [rows, head_dim]."""
        return self._flat.view(-1, self._shape.head_dim)

    @property
    def num_bytes(self) -> int:
        return self._flat.numel() * self._flat.element_size()

    def move(self, source: int, target: int, size: int) -> None:
        """Copy units down. If the ranges overlap, pieces are copied in order, the lowest first."""
        assert target < source
        step = min(size, source - target)
        for done in range(0, size, step):
            count = min(step, size - done)
            self._units(target + done, count).copy_(self._units(source + done, count))

    def copy(self, source: int, target: int, size: int) -> None:
        """Copy units to another place, which does not overlap."""
        self._units(target, size).copy_(self._units(source, size))

    def repack(self, start: int, num_units: int, capacity: int, count: int) -> None:
        """Keep the first `count` of `capacity` tokens: see `layers`. Pieces are copied in order."""
        source = self.layers(start, num_units=num_units, capacity=capacity).flatten(0, 1)
        target = self.layers(start, num_units=num_units, capacity=count).flatten(0, 1)
        low, rows = 1, len(source)  # the first row is where it should be
        while low < rows:
            # as many rows as can be written without reaching what is still to be read
            high = min(rows, max(low + 1, low * capacity // count))
            piece = source[low:high, :count]
            is_overlapping = high * count > low * capacity
            target[low:high] = piece.clone() if is_overlapping else piece
            low = high

    def wipe(self, start: int, size: int) -> None:
        """Overwrite units with zeros."""
        self._units(start, size).zero_()

    def kv(self, start: int, *, num_layers: int, capacity: int) -> KVSpan:
        """Keys and values of layers 0..num_layers−1 from unit `start` on."""
        return self.pass_kv(start, num_units=2 * num_layers, capacity=capacity)

    def pass_kv(
        self, start: int, *, num_units: int, capacity: int, shared: Sequence[torch.Tensor] = ()
    ) -> KVSpan:
        """The keys and values of a pass that has `num_units` of each token: see `KVSpan`."""
        units = self._units(start, num_units * capacity)
        return KVSpan(units, self._shape, num_units=num_units, capacity=capacity, shared=shared)

    def layers(self, start: int, *, num_units: int, capacity: int) -> torch.Tensor:
        """Keys and values in turn from unit `start` on: [num_units, kv_heads, capacity, head_dim].

        `num_units`: units of each token.
        """
        heads, dim = self._shape.num_kv_heads, self._shape.head_dim
        return self._units(start, num_units * capacity).view(num_units, heads, capacity, dim)

    def _units(self, start: int, count: int) -> torch.Tensor:
        return self._flat[start * self._width : (start + count) * self._width]
