"""Request bodies that a client has compressed: gzip, deflate and Zstandard."""

from __future__ import annotations

import sys
import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Protocol

if sys.version_info >= (3, 14):
    from compression.zstd import ZstdDecompressor, ZstdError
else:
    from backports.zstd import ZstdDecompressor, ZstdError

PIECE_BYTES = 256 << 10  # that are decoded in one go, on the event loop
MOST_EMPTY = 1000  # members in a row: what they take is counted by nobody


class Decoder(Protocol):
    """Gives the decoded bytes of one body, piece by piece."""

    @property
    def is_whole(self) -> bool:
        """Has the encoding's end come?"""
        ...

    def push(self, data: bytes) -> None:
        """Take encoded bytes."""
        ...

    def pull(self) -> bytes:
        """At most `PIECE_BYTES` decoded bytes; none: more must be pushed. Raises `ValueError`."""
        ...


class _Members(ABC):
    """A body of several members, one behind the other: each is whole for itself."""

    _left = b""  # what is not decoded yet

    def push(self, data: bytes) -> None:
        self._left += data

    def pull(self) -> bytes:
        for _ in range(MOST_EMPTY):
            piece = self._decode()
            if piece or not self._begins_member:
                return piece
        raise ValueError(f"more than {MOST_EMPTY} members in a row are empty")

    @property
    @abstractmethod
    def _begins_member(self) -> bool:
        """Is the next byte, which is here, the first one of a member?"""

    @abstractmethod
    def _decode(self) -> bytes:
        """The next piece, of one member. None may come of what is here. Raises `ValueError`."""


class _Zlib(_Members):
    """gzip, and deflate with zlib's header or without one."""

    def __init__(self) -> None:
        self._decoder: zlib._Decompress | None = None  # None: nothing has come

    @property
    def is_whole(self) -> bool:
        return not self._left and (self._decoder is None or self._decoder.eof)

    @property
    def _begins_member(self) -> bool:
        is_between = self._decoder is None or self._decoder.eof
        return is_between and len(self._left) >= 2  # a header has two bytes at least

    def _decode(self) -> bytes:
        decoder = self._decoder
        if decoder is None or (decoder.eof and self._left):
            if not self._begins_member:
                return b""
            decoder = self._decoder = zlib.decompressobj(_window_bits(self._left))
        try:
            piece = decoder.decompress(self._left, PIECE_BYTES)
        except zlib.error as error:
            raise ValueError(str(error)) from error
        self._left = decoder.unconsumed_tail or decoder.unused_data
        return piece


def _window_bits(data: bytes) -> int:
    """What zlib calls the form that begins so: gzip's, its own, or none, as old clients send it."""
    is_gzip, is_zlib = data[:2] == b"\x1f\x8b", int.from_bytes(data[:2]) % 31 == 0
    return 47 if is_gzip or (is_zlib and data[0] & 15 == 8) else -15


class _Zstd(_Members):
    def __init__(self) -> None:
        self._decoder = ZstdDecompressor()

    @property
    def is_whole(self) -> bool:
        return self._decoder.eof and not self._left

    @property
    def _begins_member(self) -> bool:
        return self._decoder.eof and bool(self._left)

    def _decode(self) -> bytes:
        if not self._left and (self._decoder.eof or self._decoder.needs_input):
            return b""
        if self._decoder.eof:  # another frame
            self._decoder = ZstdDecompressor()
        try:
            piece = self._decoder.decompress(self._left, PIECE_BYTES)
        except ZstdError as error:
            raise ValueError(str(error)) from error
        self._left = self._decoder.unused_data if self._decoder.eof else b""
        return piece


_DECODERS: dict[bytes, Callable[[], Decoder]] = {
    b"gzip": _Zlib,
    b"x-gzip": _Zlib,
    b"deflate": _Zlib,
    b"zstd": _Zstd,
}
ACCEPTED = "gzip, deflate, zstd"


class UnknownEncoding(ValueError):
    """Raised with what the header says."""


def decoder_of(headers: Iterable[tuple[bytes, bytes]]) -> Decoder | None:
    """What decodes a body with these headers; None: it is not encoded. Raises `UnknownEncoding`."""
    values = [value for name, value in headers if name == b"content-encoding"]
    said = b",".join(values).lower()
    names = [name for part in said.split(b",") if (name := part.strip()) not in (b"", b"identity")]
    if not names:
        return None
    if len(names) > 1 or names[0] not in _DECODERS:
        raise UnknownEncoding(said.decode("latin-1"))
    return _DECODERS[names[0]]()
