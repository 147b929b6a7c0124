"""Where the keys and values of several sequences lie in one memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """Keys and values of several sequences, all within one tensor of rows.

    `rows`: [rows, head_dim], contiguous. `table`: [sequences, 5], int64, contiguous, on the same
    device; for each sequence
    - the row of its first token's key in layer 0, key head 0,
    - the steps, in rows, from a key head to the next, from a key to its value, and from a layer to
      the next (a token's successor is the next row),
    - its length, in tokens, which may be 0.

    `longest`: no length is above it; the host knows it without asking the device.
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

    @classmethod
    def of_views(cls, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]) -> Spans:
        """Of views [kv_heads, tokens, head_dim] of one memory: one layer, whose number is 0."""
        kv_heads, _, head_dim = keys[0].shape
        low = min(t.storage_offset() for t in (*keys, *values))
        storage = keys[0].untyped_storage()
        num_rows = (storage.nbytes() // keys[0].element_size() - low) // head_dim
        table: list[list[int]] = []
        for key, value in zip(keys, values, strict=True):
            assert key.untyped_storage().data_ptr() == storage.data_ptr()
            assert value.untyped_storage().data_ptr() == storage.data_ptr()
            assert key.stride()[1:] == value.stride()[1:] == (head_dim, 1)
            assert key.stride(0) == value.stride(0)
            steps = (
                key.storage_offset() - low,
                key.stride(0),
                value.storage_offset() - key.storage_offset(),
            )
            assert not any(step % head_dim for step in steps)
            table.append([*(step // head_dim for step in steps), 0, key.shape[1]])
        return cls(
            rows=keys[0].as_strided((num_rows, head_dim), (head_dim, 1), low),
            table=torch.tensor(table, device=keys[0].device),
            kv_heads=kv_heads,
            longest=max(key.shape[1] for key in keys),
        )
