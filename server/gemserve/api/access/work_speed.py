"""How long prompts and answers take, learned from what the server has done under load.

A long prompt takes longer than a short one, but not as many times as it has more tokens, above all
where its document is cached; and a token of an answer takes many times as long as one of a prompt.
"""

from __future__ import annotations

from typing import NamedTuple

# Work is looked at in stretches, since what takes long is counted at its end.
_STRETCH_S, _STRETCH_PROMPTS = 0.5, 2
# After so many stretches, one counts half: for how the three times compare, and for all of them.
# The latter may change soon, when documents are no longer cached.
_HALF_LIFE, _LEVEL_HALF_LIFE = 64, 8
_MOST_LONGER = 4.0  # than expected that a stretch counts: the process may have been stopped
_DOUBT = 0.01  # how much one speed for all tokens counts beside what the stretches say
_LEAST = 0.01  # of one speed for all tokens, that any token takes
_ROUNDS = 100  # of improving each of the three times while the others stay


class Work(NamedTuple):
    """What was done, or is to be done: how many prompts, their tokens, and tokens of answers."""

    prompts: float = 0.0
    prompt_tokens: float = 0.0
    answer_tokens: float = 0.0

    def plus(self, other: Work, times: float = 1.0) -> Work:
        """Both together, of `self` only `times` as much."""
        return Work(*(times * a + b for a, b in zip(self, other, strict=True)))


class WorkSpeed:
    """The seconds of a prompt, of each of its tokens, and of each token of an answer.

    They are the least squares over stretches of time, none of them below zero, and such that the
    last stretches took as long as they did.
    """

    def __init__(self) -> None:
        self._stretch, self._stretch_s = Work(), 0.0
        self._products = (Work(),) * len(Work._fields)  # per second, of all stretches
        self._sums, self._sums_s = Work(), 0.0
        self._last, self._last_s = Work(), 0.0  # of the last stretches
        self._times: Work | None = None  # None: no stretch has ended

    @property
    def is_known(self) -> bool:
        return self._times is not None or (self._stretch_s > 0 and _num_tokens(self._stretch) > 0)

    @property
    def busy_s(self) -> float:
        """For how long work was done of which the times are known, the last of it above all."""
        return self._last_s + self._stretch_s

    def note(self, work: Work, seconds: float) -> None:
        """Count work that was done in `seconds`."""
        self._stretch = self._stretch.plus(work)
        self._stretch_s += seconds
        if self._stretch_s >= _STRETCH_S and self._stretch.prompts >= _STRETCH_PROMPTS:
            self._end_stretch()

    def forget(self, seconds: float) -> None:
        """Count `seconds` less, for work that was never done."""
        self._stretch_s = max(0.0, self._stretch_s - seconds)

    def seconds(self, work: Work) -> float:
        """How long `work` will take. Something must be known."""
        if self._times is None:
            return _product(_usual(self._stretch, self._stretch_s), work)
        level = self._last_s / max(1e-9, _product(self._times, self._last))
        return _product(self._times, work) * level

    def _end_stretch(self) -> None:
        work, seconds = self._stretch, self._stretch_s
        if self._times is not None:
            seconds = min(seconds, _MOST_LONGER * self.seconds(work))
        share, level_share = 0.5 ** (1 / _HALF_LIFE), 0.5 ** (1 / _LEVEL_HALF_LIFE)
        self._sums, self._sums_s = self._sums.plus(work, share), share * self._sums_s + seconds
        self._last = self._last.plus(work, level_share)
        self._last_s = level_share * self._last_s + seconds
        self._products = tuple(
            row.plus(Work(*(count * other / seconds for other in work)), share)
            for row, count in zip(self._products, work, strict=True)
        )
        self._stretch, self._stretch_s = Work(), 0.0
        self._times = self._learned()

    def _learned(self) -> Work:
        usual = _usual(self._sums, self._sums_s)
        times = list(usual)
        for _ in range(_ROUNDS):
            for i, row in enumerate(self._products):
                if row[i] > 0:
                    rest = self._sums[i] - _product(row, times) + row[i] * times[i]
                    rest += _DOUBT * row[i] * usual[i]
                    times[i] = max(_LEAST * usual[i], rest / (row[i] * (1 + _DOUBT)))
        return Work(*times)


def _num_tokens(work: Work) -> float:
    return work.prompt_tokens + work.answer_tokens


def _usual(work: Work, seconds: float) -> Work:
    """One speed for all tokens."""
    per_token = seconds / _num_tokens(work)
    return Work(0.0, per_token, per_token)


def _product(one: Work | list[float], other: Work | list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
