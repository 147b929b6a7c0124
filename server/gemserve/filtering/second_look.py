"""A second look: the best passages are read again, by all layers, and ranked anew.

What the lower layers attend to finds the places that have to do with the question. Which of a few
such places answers it, the whole model knows better: how likely is the question behind each of
them (Sachan et al., 2022)? That order and the first one are fused by their ranks. It pays where the
first passage or two are all that is kept; a larger budget has room for all of them.
"""

from __future__ import annotations

from gemserve.cost import ModelShape
from gemserve.filter_plan import LookPlan

LOOKED_AT = 8  # passages
LONGEST = 96  # tokens of a passage that is looked at


def look_flops(look: LookPlan, shape: ModelShape) -> float:
    """FLOPs of looking at as many passages as there may be, of the greatest length."""
    return LOOKED_AT * shape.prefill_chunk(0, LONGEST + len(look.ids([])))
