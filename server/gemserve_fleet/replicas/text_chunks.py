"""Cuts a text into chunks and names each, so that a router can ask which replica has read them.

Where a text is cut depends on the bytes around that place alone, as in rsync and restic. So an
inserted line changes the one or two chunks around it, and the others keep their names wherever they
stand. No tokenizer is needed: a router must not take longer for a long text than a replica does for
a short one. (`filtering.segment_cuts` cuts tokens; a replica's segments are other pieces of the
same text.)
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

# The last chunk has the question in it, which is new each time: of a document that fits into one
# chunk nothing would be found again. So chunks are short beside the documents that are cached.
LEAST_CHUNK = 512  # bytes
MEAN_CHUNK = 2_048  # of random text
MOST_CHUNK = 8_192
_SEEN = 8  # bytes in front of a place, by which it is chosen
_FACTOR = np.uint64(0x9E3779B97F4A7C15)
_LIMIT = np.uint64((1 << 64) // (MEAN_CHUNK - LEAST_CHUNK))
_AT_ONCE = 1 << 16  # places; so that what is computed of them stays in the processor's cache
KEY_BYTES = 16
_ASCII_PER_TOKEN = 4.0
_OTHER_PER_TOKEN = 3.0  # a Chinese character has three bytes


@dataclass(frozen=True, slots=True)
class TextChunk:
    """A piece of a text. `tokens` is an estimate from its bytes."""

    key: bytes
    tokens: int


def chunk_salt(secret: bytes, *names: str) -> bytes:
    """What the keys of one tenant's chunks are made with.

    `secret`: of the whole fleet, at most 64 bytes; without it nobody can tell from a key whether a
    text has been sent. `names`: the tenant, and what else keys and values depend on, as an adapter.
    """
    salt = hashlib.blake2b(key=secret, digest_size=32)
    for name in names:
        text = name.encode("utf-8", "surrogatepass")
        salt.update(len(text).to_bytes(8, "little") + text)
    return salt.digest()


def text_chunks(text: str, salt: bytes) -> tuple[TextChunk, ...]:
    """The chunks of `text`, in order. `salt`: see `chunk_salt`."""
    data = text.encode("utf-8", "surrogatepass")
    values = np.frombuffer(data, dtype=np.uint8)
    view = memoryview(data)
    chunks: list[TextChunk] = []
    start = 0
    for stop in _cuts(data):
        key = hashlib.blake2b(view[start:stop], key=salt, digest_size=KEY_BYTES).digest()
        chunks.append(TextChunk(key, _estimate_tokens(values[start:stop])))
        start = stop
    return tuple(chunks)


def _cuts(data: bytes) -> list[int]:
    """Where chunks end. The last one is the end of the text and may be shorter than the others."""
    if len(data) <= LEAST_CHUNK:
        return [len(data)] if data else []
    places = _places(data)
    cuts: list[int] = []
    start = 0
    while len(data) - start > LEAST_CHUNK:
        index = int(np.searchsorted(places, start + LEAST_CHUNK))
        stop = min(start + MOST_CHUNK, len(data))
        if index < len(places):
            stop = min(stop, int(places[index]))
        cuts.append(stop)
        start = stop
    if start < len(data):
        cuts.append(len(data))
    return cuts


def _places(data: bytes) -> npt.NDArray[np.int64]:
    """Places behind bytes whose hash is small, ascending. `data`: more than `LEAST_CHUNK` bytes."""
    num_places = len(data) - _SEEN + 1
    # one number of eight bytes at each byte
    seen: npt.NDArray[np.uint64] = np.ndarray(
        (num_places,), dtype=np.dtype("<u8"), buffer=data, strides=(1,)
    )
    found: list[npt.NDArray[np.int64]] = []
    for start in range(0, num_places, _AT_ONCE):
        hashes = seen[start : start + _AT_ONCE] * _FACTOR
        found.append(np.flatnonzero(hashes < _LIMIT) + (start + _SEEN))
    return np.concatenate(found)


def _estimate_tokens(values: npt.NDArray[np.uint8]) -> int:
    others = int(np.count_nonzero(values & 0x80))
    return round((len(values) - others) / _ASCII_PER_TOKEN + others / _OTHER_PER_TOKEN)
