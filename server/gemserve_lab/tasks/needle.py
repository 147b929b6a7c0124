"""`needle`: facts in filler of a given length. The fact of `single` moves through all depths.

The built-in model was trained on the forms of the first four subtasks. The others are for real
models.
"""

from __future__ import annotations

from typing import Any

from gemserve.calibration.search.example import Example, ExampleDraw, Subtasks
from gemserve.synthetic.problems import ProblemMaker
from gemserve_lab.tasks.code import code
from gemserve_lab.tasks.haystack import hide
from gemserve_lab.tasks.inference import associative, chain
from gemserve_lab.tasks.linked import far_definition, pairs
from gemserve_lab.tasks.natural import (
    natural,
    natural_several,
    near_misses,
    question_first,
)

DISTRACTORS = 7  # further facts in `multikey`
ITEMS = 4  # values in one question of `multivalue` and `multiquery`


def single(tokenizer: Any, draw: ExampleDraw) -> Example:
    """One fact."""
    rng = draw.rng("needle single")
    problem = ProblemMaker(rng).single()
    return hide(tokenizer, "single", draw, rng, problem, depth=draw.depth)


def multikey(tokenizer: Any, draw: ExampleDraw) -> Example:
    """One fact among others of its kind."""
    rng = draw.rng("needle multikey")
    maker = ProblemMaker(rng)
    problem = maker.single()
    others = [maker.single().statements[0] for _ in range(DISTRACTORS)]
    return hide(tokenizer, "multikey", draw, rng, problem, others=others)


def multivalue(tokenizer: Any, draw: ExampleDraw) -> Example:
    """All values of one subject."""
    rng = draw.rng("needle multivalue")
    return hide(tokenizer, "multivalue", draw, rng, ProblemMaker(rng).multi_value(ITEMS))


def multiquery(tokenizer: Any, draw: ExampleDraw) -> Example:
    """The values of several subjects."""
    rng = draw.rng("needle multiquery")
    return hide(tokenizer, "multiquery", draw, rng, ProblemMaker(rng).multi_query(ITEMS))


SUBTASKS: Subtasks = {
    "single": single,
    "multikey": multikey,
    "multivalue": multivalue,
    "multiquery": multiquery,
    "natural": natural,
    "natural_several": natural_several,
    "question_first": question_first,
    "near_misses": near_misses,
    "pairs": pairs,
    "far_definition": far_definition,
    "associative": associative,
    "chain": chain,
    "code": code,
}
