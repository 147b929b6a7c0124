"""Divides time between prompts and decoding, so that running streams stay regular.

Between two decode steps, prompts are read for a multiple of the duration of a decode step: for
`LEAST_PER_DECODE` times if there are more streams than unread prompts, and up to `MOST_PER_DECODE`
times if there are fewer. A decode step costs nearly the same for many streams as for one. So while
prompts wait, it pays to let streams gather. The gap between a stream's tokens grows by that
multiple, and at most by the engine's step target. Where several tenants share the engine,
`time_shares` divides its time instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemserve.engine.scheduling.time_shares import (
    SHARED_STEP_S,
    Portion,
    StepTimes,
    TenantLoad,
    divide,
)

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
    streams get their next token before prompts are read on. `portion`: what tenants may have of a
    step; None: there is one tenant, or none has a key.
    """

    chunk_tokens: int
    slice_s: float
    piece: int
    is_decode_due: bool
    portion: Portion | None = None


@dataclass(frozen=True, slots=True)
class Crowd:
    """How many sequences decode, and how many have prompts that are not read yet.

    `portion`: see `StepLimits`.
    """

    decoding: int
    unread: int
    portion: Portion | None = None


class Pace:
    """Learns how long a decode step and a FLOP take, and divides the time by it."""

    def __init__(self, target_s: float) -> None:
        self._target_s = target_s
        self._seconds_per_cost: float | None = None
        self._decode_s: float | None = None
        self._since_decode_s = 0.0
        self._owed_s = 0.0  # of what was read while tenants shared the time
        self._step_times = StepTimes()

    @property
    def seconds_per_cost(self) -> float | None:
        """Seconds that a FLOP of a prompt's pass takes. None: no pass has been measured."""
        return self._seconds_per_cost

    def divide(self, loads: Sequence[TenantLoad]) -> Portion:
        """What several tenants may have of a step: see `time_shares.divide`."""
        return divide(loads, self._step_times.seconds_of, _reading_of)

    def is_decode_due(self, crowd: Crowd) -> bool:
        """Have prompts used up their time since the last decode step?"""
        return self._since_decode_s >= _DUE * self._share(crowd)

    def slice_s(self, crowd: Crowd) -> float:
        """How long this step may read prompts."""
        used = self._since_decode_s if crowd.decoding else 0.0
        left_s = max(0.0, self._share(crowd) - used)
        return left_s if crowd.portion is None else min(SHARED_STEP_S, left_s)

    def piece_cost(self, crowd: Crowd) -> float:
        """FLOPs of one piece of a chunk's pass. It is 0 until the first pass is measured."""
        if self._seconds_per_cost is None:
            return 0.0
        piece_s = max(_LEAST_PIECE_S, min(_MOST_PIECE_S, self._share(crowd) / 3))
        return piece_s / self._seconds_per_cost

    def observe_decode(
        self, seconds: float, num_rows: int = 1, portion: Portion | None = None
    ) -> None:
        """Note that a decode step of `num_rows` sequences took `seconds`.

        Where tenants share the time, what was read beyond a portion counts for the next ones, too.
        """
        self._decode_s = _smoothed(self._decode_s, seconds)
        self._step_times.observe(num_rows, seconds)
        reading_s = None if portion is None else portion.reading_s
        self._owed_s = 0.0 if reading_s is None else max(0.0, self._owed_s - reading_s)
        self._since_decode_s = self._owed_s

    def observe_slice(self, seconds: float, portion: Portion | None = None) -> None:
        """Note that prompts were read for `seconds`."""
        self._since_decode_s += seconds
        if portion is not None and portion.reading_s is not None:
            self._owed_s += seconds

    def observe_pass(self, seconds: float, cost: float) -> None:
        """Note that a whole chunk's pass of `cost` FLOPs took `seconds`."""
        if cost > 0:
            self._seconds_per_cost = _smoothed(self._seconds_per_cost, seconds / cost)

    def _share(self, crowd: Crowd) -> float:
        """Seconds of reading between two decode steps, or in a step while nothing decodes."""
        if crowd.portion is not None and crowd.portion.reading_s is not None:
            return crowd.portion.reading_s
        if not crowd.decoding or self._decode_s is None:
            return self._target_s
        return min(self._target_s, _multiple(crowd.decoding, crowd.unread) * self._decode_s)


def _multiple(decoding: int, unread: int) -> float:
    """How many times as long as decoding prompts are read."""
    return min(MOST_PER_DECODE, LEAST_PER_DECODE * max(1.0, unread / decoding))


def _reading_of(load: TenantLoad) -> float:
    return _multiple(load.decoding, load.unread) if load.unread else 0.0


def _smoothed(old: float | None, new: float) -> float:
    return new if old is None else old + _SMOOTHING * (new - old)
