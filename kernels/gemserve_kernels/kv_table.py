"""Tells where the keys and values of several sequences are within one memory."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

import torch


@dataclass(frozen=True, kw_only=True)
class KVTable:
    """Keys and values of several sequences, all within one tensor of rows.

    `rows`: [rows, head_dim], contiguous. `table`: [sequences, 5], int64, contiguous, on the same
    device. Its columns are, for each sequence:
    - the row of its first token's key in layer 0, key head 0,
    - the number of rows from one key head to the next,
    - the number of rows from a key to its value,
    - the number of rows from one layer to the next,
    - its length in tokens, which may be 0.
    A token's successor is in the next row.

    `longest` is an upper bound of the lengths, which the host knows without asking the device.
    `places` reads the table from the device once, so the table must not change after that.
    """

    rows: torch.Tensor
    table: torch.Tensor
    kv_heads: int
    longest: int

    def __post_init__(self) -> None:
        assert self.rows.ndim == 2
        assert self.rows.is_contiguous()
        assert self.table.shape[1:] == (5,)
        assert self.table.dtype == torch.int64
        assert self.table.is_contiguous()

    @property
    def num_sequences(self) -> int:
        return int(self.table.shape[0])

    @cached_property
    def places(self) -> list[list[int]]:
        """The table on the host. Waits for the device."""
        places: list[list[int]] = self.table.tolist()
        return places

    @cached_property
    def newest(self) -> torch.Tensor:
        """Row of each sequence's last key in layer 0, for each key head: [sequences, kv_heads]."""
        heads = torch.arange(self.kv_heads, device=self.table.device)
        first, to_head, length = (self.table[:, column, None] for column in (0, 1, 4))
        return first + to_head * heads + (length - 1)

    def newest_chunks(self, size: int) -> KVTable:
        """The same sequences without what is before their last chunk of at most `size` tokens.

        Chunks begin at multiples of `size`. It does not wait for the device.
        """
        before = (self.table[:, 4] - 1).clamp_min(0) // size * size
        table = self.table.clone()
        table[:, 0] += before
        table[:, 4] -= before
        return replace(self, table=table, longest=min(self.longest, size))
