"""The keys and values of one sequence in the layers of its pass, as views of memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from gemserve.cost import ModelShape
from gemserve.kv_layout import WindowRoom
from gemserve.model.passes.recurrent_state import SequenceState
from gemserve_kernels import Backend, KVTable

_PLACE = 5  # numbers that locate a sequence: a row of `KVTable.table`
_PIECE_BYTES = 1 << 20  # of memory that moves: fewer at a time take longer


class KVSpan:
    """Keys and values of one sequence, in units of one token's keys, or values, in one layer.

    `memory`: flat, `num_units` · `capacity` units: keys and values of layer 0, of layer 1, and so
    on, without the layers that have none. An odd number of units is that of a filter pass, which
    ends with the keys of its filter layer. Its owner decides how long the memory lives.

    `shared`: the tokens before those, which other passes have computed and nobody writes to. Each
    is [num_units, kv_heads, tokens, head_dim].

    `room`: that of layers with a sliding window, which come behind the others in memory then: see
    `kv_layout`.
    """

    def __init__(
        self,
        memory: torch.Tensor,
        shape: ModelShape,
        *,
        num_units: int,
        capacity: int,
        shared: Sequence[torch.Tensor] = (),
        room: WindowRoom | None = None,
    ) -> None:
        self._memory, self._shape, self._capacity, self._room = memory, shape, capacity, room
        self._is_windowed = [False] * num_units
        self._shared = tuple(shared)
        self._num_shared = sum(part.shape[2] for part in shared)
        self._kv_index = shape.kv_index
        self._start, self._row_bytes = memory.data_ptr(), shape.head_dim * memory.element_size()
        if room is None:
            self._rows = list(self._area(0, num_units, capacity).unbind(0))
            return
        assert not shared, "the layers of a whole pass share nothing"
        self._place_windows(room)

    def _place_windows(self, room: WindowRoom) -> None:
        shape, layout = self._shape, self._shape.kv_layout()
        growing = 2 * layout.growing * self._capacity
        saved = growing + 2 * layout.windowed * room.num_saved
        areas = (
            self._area(0, 2 * layout.growing, self._capacity),
            self._area(saved, 2 * layout.windowed, room.recent),
        )
        self._saved = self._area(growing, 2 * layout.windowed, room.num_saved)
        self._recent = areas[True]
        layers = range(shape.num_layers) if shape.kv_layers is None else shape.kv_layers
        places = [shape.kv_place(layer) for layer in layers]
        self._rows = [areas[kind][2 * at + side] for kind, at in places for side in (0, 1)]
        self._is_windowed = [kind for kind, _ in places for _ in (0, 1)]
        self._row_of_window = [2 * at + side for _, at in places for side in (0, 1)]

    def _area(self, start: int, num_units: int, capacity: int) -> torch.Tensor:
        """Units from `start` on as [num_units, kv_heads, capacity, head_dim]."""
        heads, dim = self._shape.num_kv_heads, self._shape.head_dim
        width = heads * dim
        flat = self._memory[start * width : (start + num_units * capacity) * width]
        return flat.view(num_units, heads, capacity, dim)

    @property
    def head_sizes(self) -> tuple[int, int]:
        """How many key heads there are in each layer, and their size."""
        return self._shape.num_kv_heads, self._shape.head_dim

    def write(self, layer: int, start: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Store [kv_heads, tokens, head_dim] keys and values at positions `start`…"""
        row = 2 * self._kv_index(layer)
        self._store(row, start, key)
        self._store(row + 1, start, value)

    def extend(
        self, layer: int, start: int, key: torch.Tensor, value: torch.Tensor, first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store keys and values at positions `start`…, and return all from position `first` on.

        In layers with a sliding window, what is before these tokens may be lost with that.
        """
        stop = start + key.shape[1]
        row = 2 * self._kv_index(layer)
        if not self._is_windowed[row] or self._room is None or self._room.has_all:
            self.write(layer, start, key, value)
            return self.read(layer, stop, first)
        past = self.read(layer, start, first)
        whole = tuple(torch.cat(pair, dim=1) for pair in zip(past, (key, value), strict=True))
        self.write(layer, start, key, value)
        return whole[0], whole[1]

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

        Both have keys and values of all layers, none of which has a sliding window, and share
        nothing. They may begin at the same place in memory. The pieces are then copied in an order
        in which none is overwritten before it is read.
        """
        pairs, of_source = (span._pairs() for span in (self, source))
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

    def rows_of(self, slot: int, base: torch.Tensor) -> list[int]:
        """Where the tokens up to `slot` are in `base` [rows, head_dim], which this span is part of.

        Returns a row of `KVTable.table`, and behind it another one for the layers with a sliding
        window, if the model has any. These have room for the token: see `make_room`.
        """
        assert not self._shared, "a decode step reads one place for each sequence"
        heads, capacity, room = self._shape.num_kv_heads, self._capacity, self._room
        first = (self._start - base.data_ptr()) // self._row_bytes
        place = [first, *_steps(heads, capacity), slot + 1]
        if room is not None:
            recent = (self._recent.data_ptr() - base.data_ptr()) // self._row_bytes
            place += [recent, *_steps(heads, room.recent), slot + 1 - room.first(slot + 1)]
        return place

    def make_room(self, slot: int) -> None:
        """Move the recent tokens on, if there is no room for the token at `slot` behind them.

        If that fails, the sequence cannot go on: some of its layers have moved.
        """
        room = self._room
        if room is None or room.step == 0 or room.first(slot) == room.first(slot + 1):
            return
        for layer in self._recent.split(2):  # one after the other, which takes less memory
            self._move_on(layer, slot, slot + 1)

    def _move_on(self, recent: torch.Tensor, start: int, stop: int) -> int:
        """Make room for the tokens start..stop−1 in `recent` [..., tokens, head_dim].

        Returns the first token that it has room for.
        """
        assert self._room is not None
        before, first = self._room.first(start), self._room.first(stop)
        count = start - first
        if first > before and count > 0:
            moved = recent[..., first - before : first - before + count, :].clone()
            recent[..., :count, :] = moved
        return first

    def _pairs(self) -> torch.Tensor:
        """Keys and values of all layers: [layers, 2, kv_heads, capacity, head_dim]."""
        assert self._room is None
        return self._area(0, len(self._rows), self._capacity).unflatten(0, (-1, 2))

    def _store(self, row: int, start: int, numbers: torch.Tensor) -> None:
        if self._is_windowed[row]:
            self._store_recent(row, start, numbers)
            return
        low = start - self._num_shared
        assert low >= 0, "shared tokens are not written to"
        self._rows[row][:, low : low + numbers.shape[1]] = numbers

    def _store_recent(self, row: int, start: int, numbers: torch.Tensor) -> None:
        room, recent, stop = self._room, self._rows[row], start + numbers.shape[1]
        assert room is not None
        first = self._move_on(recent, start, stop)
        low = max(first, start)
        recent[:, low - first : stop - first] = numbers[:, low - start :]
        if room.has_all:
            return
        saved = self._saved[self._row_of_window[row]]
        for some in room.saved:
            low, high = max(start, some.first), min(stop, some.stop)
            if low < high:
                at = some.at - some.first
                saved[:, at + low : at + high] = numbers[:, low - start : high - start]

    def _views(self, row: int, stop: int, first: int = 0) -> list[torch.Tensor]:
        if self._is_windowed[row]:
            return [self._joined(row, first, stop)] if first < stop else []
        views: list[torch.Tensor] = []
        begin = 0
        for part in (*(part[row] for part in self._shared), self._rows[row]):
            low, high = max(first, begin), min(stop, begin + part.shape[1])
            if low < high:
                views.append(part[:, low - begin : high - begin])
            begin += part.shape[1]
        return views

    def _first_held(self, stop: int) -> int:
        """The token in the first slot of the recent ones, when the last one is before `stop`."""
        return 0 if self._room is None else self._room.first(stop)

    def _joined(self, row: int, first: int, stop: int) -> torch.Tensor:
        if self._is_windowed[row]:
            held = self._first_held(stop)
            assert first >= held, "these tokens have left their layer's window"
            return self._rows[row][:, first - held : stop - held]
        if not self._shared:
            return self._rows[row][:, first:stop]
        views = self._views(row, stop, first)
        return views[0] if len(views) == 1 else torch.cat(views, dim=1)

    def _overlaps(self, other: KVSpan) -> bool:
        (low, high), (other_low, other_high) = (
            (span._start, span._start + span._memory.numel() * span._memory.element_size())
            for span in (self, other)
        )
        return low < other_high and other_low < high


class ReadOnlyKV(KVSpan):
    """The same keys and values, of `num_tokens` tokens; a pass that reads them stores nothing."""

    def __init__(self, source: KVSpan, num_tokens: int) -> None:
        self.__dict__.update(source.__dict__)
        self._num_tokens = num_tokens

    def _first_held(self, stop: int) -> int:
        return super()._first_held(self._num_tokens)

    def _store(self, row: int, start: int, numbers: torch.Tensor) -> None:
        pass


def _steps(heads: int, capacity: int) -> tuple[int, int, int]:
    """Rows from one key head to the next, from a key to its value, and to the next layer."""
    return capacity, heads * capacity, 2 * heads * capacity


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeStep:
    """A decode step as the device sees it. `ids`, `positions`: [1, sequences], int64.

    `window_spans`: the same sequences in the layers with a sliding window, if there are any.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    spans: KVTable
    window_spans: KVTable | None = None

    @classmethod
    def over(cls, numbers: torch.Tensor, memory: Memory, longest: int) -> DecodeStep:
        """Views of `numbers`, in the layout of `DecodeBatch.numbers`.

        `longest`: as in `KVTable`.
        """
        size = len(numbers) // memory.sequence_numbers
        tables, ids, positions = numbers.split([len(numbers) - 2 * size, size, size])
        spans = [
            KVTable(
                rows=memory.rows,
                table=table,
                kv_heads=memory.num_kv_heads,
                longest=longest,
            )
            for table in tables.view(-1, size, _PLACE)
        ]
        return cls(
            ids=ids[None],
            positions=positions[None],
            spans=spans[0],
            window_spans=spans[1] if len(spans) > 1 else None,
        )


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
        self._places = [span.rows_of(slot, rows) for span, slot in zip(spans, slots, strict=True)]

    def numbers(
        self, ids: Sequence[int], positions: Sequence[int], size: int | None = None
    ) -> list[int]:
        """All numbers that the device needs, in one transfer. `DecodeStep.over` splits them.

        The batch is filled up to `size` with empty sequences.
        """
        blank = [0] * (0 if size is None else size - len(ids))
        tables: list[int] = []
        for first in range(0, self.memory.sequence_numbers - 2, _PLACE):
            for place in self._places:
                tables += place[first : first + _PLACE]
            tables += blank * _PLACE
        return [*tables, *ids, *blank, *positions, *blank]


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
    def sequence_numbers(self) -> int:
        """Numbers of a sequence in a decode step.

        They are its places, once more if the model has sliding windows, and its newest token's id
        and position.
        """
        return _PLACE * (2 if self._shape.windowed_layers else 1) + 2

    @property
    def rows(self) -> torch.Tensor:
        """The whole memory as [rows, head_dim]."""
        return self._flat.view(-1, self._shape.head_dim)

    @property
    def num_bytes(self) -> int:
        return self._flat.numel() * self._flat.element_size()

    def move(self, source: int, target: int, size: int) -> None:
        """Copy units down. If the ranges overlap, pieces are copied in order, the lowest first.

        A piece that overlaps its own place is copied elsewhere before.
        """
        assert target < source
        apart = source - target
        step = max(apart, _PIECE_BYTES // (self._width * self._flat.element_size()))
        for done in range(0, size, step):
            count = min(step, size - done)
            piece = self._units(source + done, count)
            self._units(target + done, count).copy_(piece.clone() if count > apart else piece)

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

    def kv(self, start: int, *, num_layers: int, capacity: int, is_sliding: bool = False) -> KVSpan:
        """Keys and values of all `num_layers` layers with keys and values, from unit `start` on.

        `is_sliding`: those with a sliding window have room for that only, else for all tokens.
        """
        layout = self._shape.kv_layout()
        room = layout.room(capacity) if is_sliding else layout.room_for_all(capacity)
        return self.pass_kv(start, num_units=2 * num_layers, capacity=capacity, room=room)

    def pass_kv(
        self,
        start: int,
        *,
        num_units: int,
        capacity: int,
        shared: Sequence[torch.Tensor] = (),
        room: WindowRoom | None = None,
    ) -> KVSpan:
        """The keys and values of a pass that has `num_units` of each token: see `KVSpan`."""
        size = num_units * capacity
        if room is not None:
            size = self._shape.kv_layout().units(capacity, room)
        units = self._units(start, size)
        return KVSpan(
            units, self._shape, num_units=num_units, capacity=capacity, shared=shared, room=room
        )

    def layers(self, start: int, *, num_units: int, capacity: int) -> torch.Tensor:
        """Keys and values in turn from unit `start` on: [num_units, kv_heads, capacity, head_dim].

        `num_units`: units of each token.
        """
        heads, dim = self._shape.num_kv_heads, self._shape.head_dim
        return self._units(start, num_units * capacity).view(num_units, heads, capacity, dim)

    def _units(self, start: int, count: int) -> torch.Tensor:
        return self._flat[start * self._width : (start + count) * self._width]
