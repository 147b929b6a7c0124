"""Where the keys and values of several sequences lie in one memory."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch


@dataclass(frozen=True, kw_only=True)
class Spans:
    """Keys and values of several sequences, all within one tensor of rows.

    `rows`: [rows, head_dim], contiguous. `table`: [sequences, 5], int64, contiguous, on the same
    device; for each sequence
    - the row of its first token's key in layer 0, key head 0,
    - the steps, in rows, from a key head to the next, from a key to its value, and from a layer to
      the next (a token's successor is the next row),
    - its length, in tokens, which may be 0.

    `longest`: no length is above it; the host knows it without asking the device. For the rest it
    asks at most once: a table must not change after that.
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
        """The table on the host; waits for the device."""
        places: list[list[int]] = self.table.tolist()
        return places

    @cached_property
    def newest(self) -> torch.Tensor:
        """Rows of each sequence's last key in layer 0, head by head: [sequences, kv_heads]."""
        heads = torch.arange(self.kv_heads, device=self.table.device)
        first, to_head, length = (self.table[:, column, None] for column in (0, 1, 4))
        return first + to_head * heads + (length - 1)
