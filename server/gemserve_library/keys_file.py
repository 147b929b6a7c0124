"""The file that has the keys of a library's segments, one record for each token.

It only grows, and is mapped into memory when it is searched. A record has the keys of each key
head, in 8 bits each, and one scale for each head. Where segments were removed there are zeros.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from zlib import crc32

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Records = npt.NDArray[np.void]  # [tokens], see `record_type`

_MOST = 127  # of an 8-bit number
_AT_ONCE = 1 << 16  # records that are overwritten at once


def record_type(num_heads: int, head_dim: int) -> np.dtype[np.void]:
    """A token's record: `scale` [num_heads] float16, and `keys` [num_heads, head_dim] int8."""
    return np.dtype([("scale", "<f2", (num_heads,)), ("keys", "i1", (num_heads, head_dim))])


def rounded_keys(keys: Floats) -> Records:
    """The records of the keys [num_heads, tokens, head_dim]: [tokens]."""
    num_heads, num_tokens, head_dim = keys.shape
    records = np.zeros(num_tokens, record_type(num_heads, head_dim))
    largest = np.abs(keys).max(axis=2, initial=0)  # [num_heads, tokens]
    # the scale is rounded first, so that no number is beyond the largest
    scale = np.nextafter((largest / _MOST).astype(np.float16), np.float16(np.inf))
    whole = np.rint(keys / scale[..., None].astype(np.float32))
    records["scale"] = scale.T
    records["keys"] = whole.clip(-_MOST, _MOST).astype(np.int8).transpose(1, 0, 2)
    return records


def checksum(records: Records) -> int:
    return crc32(np.ascontiguousarray(records).view(np.uint8).data)


class KeysFile:
    """Records 0, 1, …, of which the first `count` are in use: the index says how many."""

    def __init__(self, path: Path, num_heads: int, head_dim: int) -> None:
        self.path, self.dtype = path, record_type(num_heads, head_dim)

    def write(self, start: int, records: Records) -> None:
        """Write records from number `start` on, and wait until the disk has them.

        Raises `OSError`, for example if the disk is full. What is behind `start` is then undefined.
        """
        self.write_all([(start, records)])

    def write_all(self, parts: Iterable[tuple[int, Records]]) -> None:
        """Likewise for records from each of several numbers on, with one wait for the disk."""
        self._write((start, self._bytes_of(each)) for start, each in parts)

    def erase(self, ranges: Sequence[tuple[int, int]]) -> None:
        """Overwrite these half-open ranges of records with zeros."""
        if ranges:
            self._write(
                (at, bytes(min(_AT_ONCE, stop - at) * self.dtype.itemsize))
                for start, stop in ranges
                for at in range(start, stop, _AT_ONCE)
            )

    def read(self, count: int) -> Records:
        """The first `count` records, mapped into memory. Raises `OSError` or `ValueError`."""
        if count == 0:
            return np.zeros(0, self.dtype)
        size = self.path.stat().st_size
        if count * self.dtype.itemsize > size:  # NumPy counts in 64 bits, and may overflow
            raise ValueError(f"{self.path.name}: {count} records are more than {size} bytes")
        return np.memmap(self.path, self.dtype, mode="r", shape=(count,))

    def _bytes_of(self, records: Records) -> memoryview:
        assert records.dtype == self.dtype
        return np.ascontiguousarray(records).view(np.uint8).data

    def _write(self, parts: Iterable[tuple[int, bytes | memoryview]]) -> None:
        descriptor = os.open(self.path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            for start, part in parts:
                at, left = start * self.dtype.itemsize, memoryview(part)
                while left:
                    written = os.pwrite(descriptor, left, at)
                    left, at = left[written:], at + written
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
