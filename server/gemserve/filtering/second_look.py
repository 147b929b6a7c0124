"""A second look: the best passages are read again, by all layers, and ranked anew.

What the lower layers attend to finds the places that have to do with the question. Which of a few
such places answers it, the whole model knows better: how likely is the question behind each of
them (Sachan et al., 2022)? That order and the first one are fused by their ranks. It pays where the
first passage or two are all that is kept; a larger budget has room for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

from gemserve.cost import ModelShape

LOOKED_AT = 8  # passages
LONGEST = 96  # tokens of a passage that is looked at


@dataclass(frozen=True, slots=True, kw_only=True)
class LookPlan:
    """What is read around a passage: token ids `before` it and `after` it, and the question's.

    How likely those that are `asked` are says how well the passage answers them.
    """

    before: tuple[int, ...]
    after: tuple[int, ...]
    asked: tuple[int, ...]

    def ids(self, passage: list[int]) -> list[int]:
        """All that is read for one passage."""
        return [*self.before, *passage, *self.after, *self.asked]

    def flops(self, shape: ModelShape) -> float:
        """FLOPs of looking at as many passages as there may be, of the greatest length."""
        beside = len(self.before) + len(self.after) + len(self.asked)
        return LOOKED_AT * shape.prefill_chunk(0, LONGEST + beside)
