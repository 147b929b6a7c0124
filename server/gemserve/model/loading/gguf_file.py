"""Reads the GGUF format: metadata and the table of tensors, without reading a weight.

The `gguf` package's own reader takes seconds for a vocabulary. This one takes a tenth of a second.
"""

from __future__ import annotations

import importlib.util
import mmap
import struct
from collections import Counter
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from gemserve.errors import ModelError, shown

_LENGTH = struct.Struct("<Q")  # of a string
# value types of fixed width, as letters of `struct`
_FIXED = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_VERSIONS = (2, 3)
_MAX_DIMS = 4  # of ggml
_MAX_DEPTH = 4  # of arrays in arrays, of which no known file has any
_MAX_ELEMENTS = 1 << 24  # of all arrays together; the largest vocabularies have less than a tenth
_MAX_ALIGNMENT = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufTensor:
    """`shape` in torch's order. The tensor's `num_bytes` are in the file from `start` on."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    start: int
    num_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GgufFile:
    path: Path
    metadata: dict[str, Any]
    tensors: tuple[GgufTensor, ...]

    @property
    def architecture(self) -> str:
        return str(self.metadata["general.architecture"])

    def setting(self, name: str) -> Any:
        """The value of `ARCHITECTURE.name`, or None."""
        return self.metadata.get(f"{self.architecture}.{name}")

    def types(self) -> dict[str, int]:
        """How many tensors have each quantisation type, the most frequent first."""
        from gguf import GGMLQuantizationType

        counts = Counter(GGMLQuantizationType(tensor.type_id).name for tensor in self.tensors)
        return dict(counts.most_common())


def read_gguf(path: Path) -> GgufFile:
    """Read a GGUF file.

    Raises `ModelError` if it is not a GGUF file, is cut off, or is of an unknown kind.
    """
    if importlib.util.find_spec("gguf") is None:
        raise ModelError(
            f"{path}: reading GGUF files needs the package gguf: pip install 'gemserve[gguf]', or "
            "pip install gguf"
        )
    try:
        with path.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise ModelError(f"{path}: not a GGUF file, which begins with the letters GGUF")
            data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except OSError as error:
        raise ModelError(f"{path}: cannot be read ({error})") from error
    with data:
        return _parse(path, _Cursor(data, path))


def _parse(path: Path, cursor: _Cursor) -> GgufFile:
    (version,) = cursor.take("I")
    if version not in _VERSIONS:
        raise ModelError(f"{path}: GGUF version {version}; versions 2 and 3 can be read")
    num_tensors, num_values = cursor.take("QQ")
    metadata = {}
    for _ in range(num_values):
        key = cursor.string()
        metadata[key] = cursor.value(key, cursor.take("I")[0])
    if not isinstance(metadata.get("general.architecture"), str):
        raise ModelError(f"{path}: does not name its architecture (general.architecture)")
    if metadata.get("split.count", 1) not in (0, 1):
        raise ModelError(
            f"{path}: one of {metadata['split.count']} parts of a model; llama.cpp's "
            "llama-gguf-split --merge makes one file of them"
        )
    rows = [_row(cursor) for _ in range(num_tensors)]
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= _MAX_ALIGNMENT:
        raise ModelError(
            f"{path}: general.alignment={shown(alignment)}: must be from 1 to {_MAX_ALIGNMENT}"
        )
    base = -(-cursor.position // alignment) * alignment
    tensors = tuple(_tensor(path, row, base) for row in rows)
    repeated = [name for name, n in Counter(tensor.name for tensor in tensors).items() if n > 1]
    if repeated:
        raise ModelError(f"{path}: has more than one tensor {shown(repeated[0])}")
    expected = max((tensor.start + tensor.num_bytes for tensor in tensors), default=base)
    if expected > cursor.size:
        raise ModelError(
            f"{path}: cut off: its tensors need {expected:,} bytes, the file has {cursor.size:,}"
        )
    return GgufFile(path=path, metadata=metadata, tensors=tensors)


def _row(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    """Name, shape, type and offset of the next tensor in the table."""
    name = cursor.string()
    (num_dims,) = cursor.take("I")
    if num_dims > _MAX_DIMS:
        raise ModelError(
            f"{cursor.path}: tensor {shown(name)} has {num_dims} dimensions, the limit is "
            f"{_MAX_DIMS}"
        )
    dims = cursor.take(f"{num_dims}Q")
    type_id, offset = cursor.take("IQ")
    return name, tuple(reversed(dims)), type_id, offset


def _tensor(path: Path, row: tuple[str, tuple[int, ...], int, int], base: int) -> GgufTensor:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    name, shape, type_id, offset = row
    try:
        block_elements, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(type_id)]
    except (KeyError, ValueError) as error:
        raise ModelError(
            f"{path}: tensor {shown(name)} has quantisation type {type_id}, which the installed "
            "gguf package does not know"
        ) from error
    if prod(shape) % block_elements:
        raise ModelError(
            f"{path}: tensor {shown(name)} has {prod(shape)} elements, and its type stores them by "
            f"{block_elements}"
        )
    num_bytes = prod(shape) // block_elements * block_bytes
    return GgufTensor(
        name=name, shape=shape, type_id=type_id, start=base + offset, num_bytes=num_bytes
    )


class _Cursor:
    """Reads values one after another. Raises `ModelError` at the end of the file."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data, self.path = data, path
        self.size = len(data)
        self.position = 4  # after the magic letters
        self._num_elements = 0  # of arrays

    def take(self, letters: str) -> tuple[Any, ...]:
        start = self._skip(struct.calcsize("<" + letters))
        return struct.unpack_from("<" + letters, self._data, start)

    def string(self) -> str:
        length = _LENGTH.unpack_from(self._data, self._skip(_LENGTH.size))[0]
        start = self._skip(length)
        # llama.cpp and some vocabularies keep parts of characters
        return self._data[start : start + length].decode("utf-8", errors="replace")

    def value(self, key: str, kind: int, depth: int = 0) -> Any:
        if kind in _FIXED:
            return self.take(_FIXED[kind])[0]
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise ModelError(f"{self.path}: its metadata has a value of unknown type {kind}")
        if depth == _MAX_DEPTH:
            raise ModelError(f"{self.path}: its metadata has arrays nested deeper than {depth}")
        element, count = self.take("IQ")
        self._check(count)
        self._num_elements += count
        if self._num_elements > _MAX_ELEMENTS:
            raise ModelError(
                f"{self.path}: {shown(key)} has {count:,} elements; arrays may have "
                f"{_MAX_ELEMENTS:,} together"
            )
        if element in _FIXED:
            return list(self.take(f"{count}{_FIXED[element]}"))
        return [self.value(key, element, depth + 1) for _ in range(count)]

    def _skip(self, num_bytes: int) -> int:
        self._check(num_bytes)
        start = self.position
        self.position += num_bytes
        return start

    def _check(self, num_bytes: int) -> None:
        if self.position + num_bytes > self.size:
            raise ModelError(
                f"{self.path}: cut off within its metadata: the file has {self.size:,} bytes and "
                f"at least {self.position + num_bytes:,} are needed"
            )
