"""Files of the document cache: keys and values of one filter pass or segment, proven before use.

A file is in the safetensors format. Its tensors `segment.0`, `segment.1`, … hold the keys and
values of blocks of some hundred tokens: [units, kv_heads, tokens, head_dim]. The header has a
checksum of each block, and hashes of the tokens, which are not in the file themselves: of a pass a
chain, of a segment one hash of its name.
The last tensor, `seal`, is a keyed hash of the header. So what was cut off, altered, or written by
somebody else is found before it is used.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import json
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

CHAIN_TOKENS = 256  # tokens between two links of a hash chain
FORMAT = "gemserve-kv-2"
NAME = "kv-[0-9a-f]{32}"
_LINK_BYTES = 16
_SUM_BYTES = 32
_MAX_HEADER_BYTES = 64 << 20


class DamagedFile(Exception):
    """A file is not what this server has written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FileInfo:
    """What a file's header says.

    `chain`: a hash of everything up to each `CHAIN_TOKENS` tokens, or the only one of a segment.
    `shape`: units, key heads and head size. `ids`: the stored documents in it. `seconds_per_cost`:
    how fast the server computed when it wrote the file.
    """

    path: Path
    chain: tuple[bytes, ...]
    num_tokens: int
    shape: tuple[int, int, int]
    dtype: str
    element_bytes: int
    block_tokens: int
    ids: frozenset[str]
    seconds_per_cost: float
    checksums: tuple[bytes, ...] = ()
    data_start: int = 0

    @property
    def token_bytes(self) -> int:
        units, heads, dim = self.shape
        return units * heads * dim * self.element_bytes

    @property
    def num_blocks(self) -> int:
        return -(-self.num_tokens // self.block_tokens)

    @property
    def num_bytes(self) -> int:
        """The size of the file, without its header if that is not written yet."""
        return self.data_start + self.num_tokens * self.token_bytes + _SUM_BYTES

    def tokens_of(self, block: int) -> tuple[int, int]:
        """The first token of a block, and how many it has."""
        start = block * self.block_tokens
        return start, min(self.block_tokens, self.num_tokens - start)


class FileWriter:
    """Writes one file beside its place; nothing is at its place before all of it is on the disk."""

    def __init__(self, info: FileInfo, key: bytes) -> None:
        self._info, self._key = info, key
        self.temporary = info.path.with_suffix(".tmp")
        self._sums: list[bytes] = []
        self._header_bytes = len(_header(info, [bytes(_SUM_BYTES)] * info.num_blocks))
        opened = os.open(self.temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        self._file = os.fdopen(opened, "wb", buffering=0)
        self._file.seek(self._header_bytes)  # writing might fail, with nobody to remove the file

    def add(self, data: memoryview) -> None:
        """Append the next block."""
        self._sums.append(checksum(data))
        self._write(data)

    def finish(self) -> None:
        """Complete the temporary file. It is on the disk when this returns."""
        header = _header(self._info, self._sums)
        assert len(header) == self._header_bytes
        self._write(_seal(header, self._key))
        self._file.seek(0)
        self._write(header)
        os.fsync(self._file.fileno())
        self._file.close()

    def publish(self) -> FileInfo:
        """Put the file to its place."""
        os.replace(self.temporary, self._info.path)
        return _with_place(self._info, self._sums, self._header_bytes)

    def settle(self) -> None:
        """Let its place outlive a crash of the machine."""
        with suppress(OSError):  # not every file system can do this
            folder = os.open(self._info.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)

    def abort(self) -> None:
        """Leave nothing behind. Idempotent."""
        with suppress(OSError):
            self._file.close()
        with suppress(OSError):
            self.temporary.unlink()

    def _write(self, data: bytes | memoryview) -> None:
        view = memoryview(data)
        while len(view):
            view = view[self._file.write(view) :]


def read_info(path: Path, key: bytes) -> FileInfo:
    """The header of a file. Raises `DamagedFile` or `OSError`."""
    with open(path, "rb", opener=open_plain) as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or length > min(size, _MAX_HEADER_BYTES):
            raise DamagedFile("it is cut off")
        header = start + file.read(length)
        file.seek(max(0, size - _SUM_BYTES))
        if not hmac.compare_digest(file.read(_SUM_BYTES), _seal(header, key)):
            raise DamagedFile("it is damaged, cut off, or was written with another salt")
    fields = json.loads(header[8:])["__metadata__"]
    if fields["format"] != FORMAT:
        raise DamagedFile(f"its format is {fields['format']}, not {FORMAT}")
    info = FileInfo(
        path=path,
        chain=_parts(bytes.fromhex(fields["chain"]), _LINK_BYTES),
        num_tokens=int(fields["num_tokens"]),
        shape=tuple(json.loads(fields["shape"])),
        dtype=fields["dtype"],
        element_bytes=int(fields["element_bytes"]),
        block_tokens=int(fields["segment_tokens"]),
        ids=frozenset(json.loads(fields["ids"])),
        seconds_per_cost=float(fields["seconds_per_cost"]),
        checksums=_parts(bytes.fromhex(fields["checksums"]), _SUM_BYTES),
        data_start=len(header),
    )
    if info.num_bytes != size:
        raise DamagedFile("it has too many bytes, or too few")
    return info


def open_plain(path: str, flags: int) -> int:
    """An opener for files alone: opening a pipe would wait for its writer. Raises `OSError`."""
    opened = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(opened).st_mode):
        os.close(opened)
        raise OSError(errno.EINVAL, "it is not a file", path)
    return opened


def read_block(file: BinaryIO, info: FileInfo, block: int) -> bytearray:
    """The bytes of one block. Raises `DamagedFile` or `OSError`."""
    start, count = info.tokens_of(block)
    data = bytearray(count * info.token_bytes)
    view = memoryview(data)
    file.seek(info.data_start + start * info.token_bytes)
    while len(view):
        num_read = file.readinto(view)  # type: ignore[attr-defined]
        if not num_read:
            raise DamagedFile("it is cut off")
        view = view[num_read:]
    if checksum(memoryview(data)) != info.checksums[block]:
        raise DamagedFile(f"segment {block} is damaged")
    return data


def hash_chain(key: bytes, seed: bytes, tokens: Any) -> tuple[bytes, ...]:
    """A hash of `seed` and all tokens up to each `CHAIN_TOKENS`; `tokens`: array of int64."""
    chain = []
    link = hashlib.blake2b(seed, key=key, digest_size=_LINK_BYTES).digest()
    for stop in range(CHAIN_TOKENS, len(tokens) + 1, CHAIN_TOKENS):
        part = tokens[stop - CHAIN_TOKENS : stop].astype("<i8").tobytes()
        link = hashlib.blake2b(link + part, key=key, digest_size=_LINK_BYTES).digest()
        chain.append(link)
    return tuple(chain)


def hash_segment(key: bytes, seed: bytes, name: bytes) -> bytes:
    """A hash of `seed` and a segment's name, which is no link of any chain."""
    start = hashlib.blake2b(seed, key=key, digest_size=_LINK_BYTES).digest()
    keyed = hashlib.blake2b(start + name, key=key, digest_size=_LINK_BYTES, person=b"window")
    return keyed.digest()


def _header(info: FileInfo, sums: Sequence[bytes]) -> bytes:
    """The length of the header and the header, whose size does not depend on `sums`."""
    units, heads, dim = info.shape
    tensors: dict[str, Any] = {
        "__metadata__": {
            "format": FORMAT,
            "chain": b"".join(info.chain).hex(),
            "num_tokens": str(info.num_tokens),
            "checksums": b"".join(sums).hex(),
            "shape": json.dumps(info.shape),
            "dtype": info.dtype,
            "element_bytes": str(info.element_bytes),
            "segment_tokens": str(info.block_tokens),
            "ids": json.dumps(sorted(info.ids)),
            "seconds_per_cost": repr(info.seconds_per_cost),
        }
    }
    end = 0
    for block in range(info.num_blocks):
        count = info.tokens_of(block)[1]
        start, end = end, end + count * info.token_bytes
        tensors[f"segment.{block}"] = {
            "dtype": info.dtype,
            "shape": [units, heads, count, dim],
            "data_offsets": [start, end],
        }
    tensors["seal"] = {
        "dtype": "U8",
        "shape": [_SUM_BYTES],
        "data_offsets": [end, end + _SUM_BYTES],
    }
    text = json.dumps(tensors).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def _with_place(info: FileInfo, sums: Sequence[bytes], header_bytes: int) -> FileInfo:
    return replace(info, checksums=tuple(sums), data_start=header_bytes)


def checksum(data: memoryview) -> bytes:
    return hashlib.blake2b(data, digest_size=_SUM_BYTES).digest()


def _seal(header: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(header, key=key, digest_size=_SUM_BYTES, person=b"seal").digest()


def _parts(data: bytes, size: int) -> tuple[bytes, ...]:
    return tuple(data[i : i + size] for i in range(0, len(data), size))
