"""How much prompt work a step may hold, so that running streams keep their rhythm. No torch."""

from __future__ import annotations

# Prompt work beside decoding may take this many times as long as the decoding itself.
CHUNK_PER_DECODE = 2.1
_SMOOTHING = 0.2


class Pace:
    """Learns seconds per unit of cost and per decode step, and sets the next step's budget.

    With nothing decoding a step aims at `target_s`, so that cancellations are seen soon. With
    streams running it aims at `CHUNK_PER_DECODE` times what their decode step takes, at most
    `target_s`: the gap between their tokens grows by that factor and no further.
    """

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._seconds_per_cost: float | None = None
        self._decode_s: float | None = None

    def budget(self, is_decoding: bool) -> float:
        """Cost that the next step's chunks may have in all; 0 (one smallest chunk) until known."""
        if self._seconds_per_cost is None:
            return 0.0
        seconds = self._target_s
        if is_decoding and self._decode_s is not None:
            seconds = min(seconds, CHUNK_PER_DECODE * self._decode_s)
        return seconds / self._seconds_per_cost

    def observe(self, decode_s: float, chunks_s: float, cost: float) -> None:
        """A step's decode took `decode_s`, its chunks, worth `cost`, `chunks_s`."""
        if cost > 0:
            self._seconds_per_cost = _smoothed(self._seconds_per_cost, chunks_s / cost)
        if decode_s > 0:
            self._decode_s = _smoothed(self._decode_s, decode_s)


def _smoothed(old: float | None, new: float) -> float:
    return new if old is None else old + _SMOOTHING * (new - old)
