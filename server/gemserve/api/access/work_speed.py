"""How long prompts and answers take, learned from what the server has done under load.

A long prompt takes longer than a short one, but not as many times as it has more tokens, above all
where its document is cached; and a token of an answer takes many times as long as one of a prompt.
"""

from __future__ import annotations

from typing import NamedTuple

_HALF_LIFE_S = 30.0  # of what is known, in time under load
# Work is looked at in stretches, since what takes long is counted at its end.
_STRETCH_S, _STRETCH_PROMPTS = 0.5, 2
_DOUBT = 0.01  # how much one speed for all tokens counts beside what the stretches say
_LEAST = 0.01  # of one speed for all tokens, that any token takes
_MOST_SCALE = 4.0  # by which all three times are longer or shorter than the stretches say
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

    They are the least squares over stretches of time, none of them below zero, and as far as that
    is near such that all that is known to have been done takes as long as it did.
    """

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._done = Work()
        self._stretch, self._stretch_s = Work(), 0.0
        self._products = (Work(),) * len(Work._fields)  # per second, of all stretches
        self._sums = Work()
        self._times: Work | None = None  # None: no stretch has ended

    @property
    def is_known(self) -> bool:
        return self.busy_s > 0 and self._done.prompt_tokens + self._done.answer_tokens > 0

    def note(self, work: Work, seconds: float) -> None:
        """Count work that was done in `seconds`, and forget the past."""
        share = 0.5 ** (seconds / _HALF_LIFE_S)
        self.busy_s = self.busy_s * share + seconds
        self._done = self._done.plus(work, share)
        self._stretch = self._stretch.plus(work)
        self._stretch_s += seconds
        if self._stretch_s >= _STRETCH_S and self._stretch.prompts >= _STRETCH_PROMPTS:
            self._end_stretch()

    def seconds(self, work: Work) -> float:
        """How long `work` will take. Something must be known."""
        if self._times is None:
            return _product(self._usual(), work)
        # while one long answer is drawn alone, its tokens say nothing about prompts
        scale = self.busy_s / max(1e-9, _product(self._times, self._done))
        return _product(self._times, work) * min(_MOST_SCALE, max(1 / _MOST_SCALE, scale))

    def _end_stretch(self) -> None:
        share = 0.5 ** (self._stretch_s / _HALF_LIFE_S)
        self._sums = self._sums.plus(self._stretch, share)
        self._products = tuple(
            row.plus(Work(*(count * other / self._stretch_s for other in self._stretch)), share)
            for row, count in zip(self._products, self._stretch, strict=True)
        )
        self._stretch, self._stretch_s = Work(), 0.0
        self._times = self._learned()

    def _usual(self) -> Work:
        """One speed for all tokens."""
        per_token = self.busy_s / (self._done.prompt_tokens + self._done.answer_tokens)
        return Work(0.0, per_token, per_token)

    def _learned(self) -> Work:
        usual = self._usual()
        times = list(usual)
        for _ in range(_ROUNDS):
            for i, row in enumerate(self._products):
                if row[i] > 0:
                    rest = self._sums[i] - _product(row, times) + row[i] * times[i]
                    rest += _DOUBT * row[i] * usual[i]
                    times[i] = max(_LEAST * usual[i], rest / (row[i] * (1 + _DOUBT)))
        return Work(*times)


def _product(one: Work | list[float], other: Work | list[float]) -> float:
    return sum(a * b for a, b in zip(one, other, strict=True))
