"""Which chunks of texts a replica's document cache holds: what it tells the router. No torch.

The cache knows tokens, and the router pieces of the body's text. So a chunk counts as held while
the cache holds the part of the prompt in which the chunk's middle is, by its share of the text.
What stands around the text, as a chat template does, is short beside the texts that matter here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from gemserve.contract.reading_notes import CacheEntry, ReadingNotes
from gemserve_fleet.replicas.text_chunks import KEY_BYTES, TextChunk

# Of keys that are reported: 320 KB each second, for about 10 million tokens.
MOST_KEYS = 20_000


class CachedChunks:
    """Follows what the engine notes of requests. It is used on one event loop."""

    def __init__(self, most_keys: int = MOST_KEYS) -> None:
        self._most_keys = most_keys
        self._entries: dict[bytes, list[CacheEntry]] = {}  # by key; the last one noted is last
        self._watched: dict[int, tuple[ReadingNotes, Sequence[TextChunk], int]] = {}

    def watch(self, notes: ReadingNotes, chunks: Sequence[TextChunk]) -> None:
        """Follow a request with this text until `end`."""
        if chunks:
            self._watched[id(notes)] = notes, chunks, 0

    def end(self, notes: ReadingNotes) -> None:
        """Take what has been noted, and follow it no longer. Idempotent."""
        if id(notes) in self._watched:
            self._take(notes)
            del self._watched[id(notes)]

    def keys(self) -> bytes:
        """The keys of all chunks that the cache holds now, one behind the other."""
        for notes, *_ in list(self._watched.values()):
            self._take(notes)
        for key, entries in list(self._entries.items()):
            entries[:] = [entry for entry in entries if not entry.is_dropped]
            if not entries:
                del self._entries[key]
        for key in list(self._entries)[: -self._most_keys]:
            del self._entries[key]
        return b"".join(self._entries)

    def _take(self, notes: ReadingNotes) -> None:
        _, chunks, num_taken = self._watched[id(notes)]
        parts = notes.held[num_taken:]  # the engine's thread may append meanwhile
        self._watched[id(notes)] = notes, chunks, num_taken + len(parts)
        if not parts:
            return
        middles = _middles(chunks)
        for part in parts:
            first, last = bisect_left(middles, part.start), bisect_left(middles, part.stop)
            for chunk in chunks[first:last]:
                entries = self._entries.pop(chunk.key, [])
                if part.entry not in entries:
                    entries.append(part.entry)
                self._entries[chunk.key] = entries


def split_keys(keys: bytes) -> list[bytes]:
    """The keys that `CachedChunks.keys` has joined."""
    return [keys[start : start + KEY_BYTES] for start in range(0, len(keys), KEY_BYTES)]


def _middles(chunks: Sequence[TextChunk]) -> list[float]:
    """Where the middle of each chunk is, as a share of all their tokens."""
    total = sum(chunk.tokens for chunk in chunks) or 1
    middles, before = [], 0
    for chunk in chunks:
        middles.append((before + chunk.tokens / 2) / total)
        before += chunk.tokens
    return middles
