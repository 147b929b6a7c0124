"""Divides time between prompts and decoding, so that running streams stay regular.

Between two decode steps, prompts are read for a multiple of the duration of a decode step: for
`LEAST_PER_DECODE` times if there are more streams than unread prompts, and up to `MOST_PER_DECODE`
times if there are fewer. A decode step costs nearly the same for many streams as for one. So while
prompts wait, it pays to let streams gather. The gap between a stream's tokens grows by that
multiple, and at most by the engine's step target.
"""

from __future__ import annotations

from dataclasses import dataclass

# While sequences decode, prompts may take this many times as long as the decoding.
LEAST_PER_DECODE = 1.7
MOST_PER_DECODE = 8.0
# A decode step is due once prompts have used this share of their time.
_DUE = 0.9
# Target time of one piece of a pass. Between these, a slice beside streams has three pieces.
_LEAST_PIECE_S = 0.02
_MOST_PIECE_S = 0.06
_SMOOTHING = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class StepLimits:
    """How much one step may do.

    `chunk_tokens`: tokens of a chunk that begins in this step. `slice_s`: seconds of reading a
    prompt. `piece`: query-key pairs after which a chunk's pass may pause. `is_decode_due`: running
    streams get their next token before prompts are read on.
    """

    chunk_tokens: int
    slice_s: float
    piece: int
    is_decode_due: bool


@dataclass(frozen=True, slots=True)
class Crowd:
    """How many sequences decode, and how many have prompts that are not read yet."""

    decoding: int
    unread: int


class Pace:
    """Learns how long a decode step and a FLOP take, and divides the time by it."""

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._seconds_per_cost: float | None = None
        self._decode_s: float | None = None
        self._since_decode_s = 0.0

    @property
    def seconds_per_cost(self) -> float | None:
        """Seconds that a FLOP of a prompt's pass takes. None: no pass has been measured."""
        return self._seconds_per_cost

    def is_decode_due(self, crowd: Crowd) -> bool:
        """Have prompts used up their time since the last decode step?"""
        return self._since_decode_s >= _DUE * self._share(crowd)

    def slice_s(self, crowd: Crowd) -> float:
        """How long this step may read prompts."""
        used = self._since_decode_s if crowd.decoding else 0.0
        return max(0.0, self._share(crowd) - used)

    def piece_cost(self, crowd: Crowd) -> float:
        """FLOPs of one piece of a chunk's pass. It is 0 until the first pass is measured."""
        if self._seconds_per_cost is None:
            return 0.0
        piece_s = max(_LEAST_PIECE_S, min(_MOST_PIECE_S, self._share(crowd) / 3))
        return piece_s / self._seconds_per_cost

    def observe_decode(self, seconds: float) -> None:
        self._decode_s = _smoothed(self._decode_s, seconds)
        self._since_decode_s = 0.0

    def observe_slice(self, seconds: float) -> None:
        """Note that prompts were read for `seconds`."""
        self._since_decode_s += seconds

    def observe_pass(self, seconds: float, cost: float) -> None:
        """Note that a whole chunk's pass of `cost` FLOPs took `seconds`."""
        if cost > 0:
            self._seconds_per_cost = _smoothed(self._seconds_per_cost, seconds / cost)

    def _share(self, crowd: Crowd) -> float:
        """Seconds of reading between two decode steps, or in a step while nothing decodes."""
        if not crowd.decoding or self._decode_s is None:
            return self._target_s
        multiple = LEAST_PER_DECODE * max(1.0, crowd.unread / crowd.decoding)
        return min(self._target_s, min(MOST_PER_DECODE, multiple) * self._decode_s)


def _smoothed(old: float | None, new: float) -> float:
    return new if old is None else old + _SMOOTHING * (new - old)
