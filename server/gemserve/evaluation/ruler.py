"""`ruler`: the task families of RULER that need no download, from generators of our own.

Retrieval in RULER's one wording (`niah_…`), variable tracking (`vt`), and two aggregation tasks
(`cwe`, `fwe`), in which nothing can be left out of the document: no filter can do well there.
Unlike RULER's, lists ask for three words, so that small models can be scored at all.
"""

from __future__ import annotations

from typing import Any

from gemserve.evaluation.example import Draw, Example, Subtasks, hide, make_example
from gemserve.evaluation.problems import RULER_WORDING, Problem, ProblemMaker

KEYS = 4  # facts in the document of `niah_multikey`
ITEMS = 4  # values asked for at once
HOPS = 4  # copies in the chain of `vt`
COMMON = 3  # words asked for in `cwe` and `fwe`


def niah_single(tokenizer: Any, draw: Draw) -> Example:
    rng = draw.rng("ruler niah_single")
    problem = ProblemMaker(rng, wording=RULER_WORDING).single()
    return hide(tokenizer, "niah_single", draw, rng, problem, depth=draw.depth)


def niah_multikey(tokenizer: Any, draw: Draw) -> Example:
    rng = draw.rng("ruler niah_multikey")
    maker = ProblemMaker(rng, wording=RULER_WORDING)
    problem = maker.single()
    others = [maker.single().statements[0] for _ in range(KEYS - 1)]
    return hide(tokenizer, "niah_multikey", draw, rng, problem, others=others)


def niah_multivalue(tokenizer: Any, draw: Draw) -> Example:
    rng = draw.rng("ruler niah_multivalue")
    problem = ProblemMaker(rng, wording=RULER_WORDING).multi_value(ITEMS)
    return hide(tokenizer, "niah_multivalue", draw, rng, problem)


def niah_multiquery(tokenizer: Any, draw: Draw) -> Example:
    rng = draw.rng("ruler niah_multiquery")
    problem = ProblemMaker(rng, wording=RULER_WORDING).multi_query(ITEMS)
    return hide(tokenizer, "niah_multiquery", draw, rng, problem)


def vt(tokenizer: Any, draw: Draw) -> Example:
    """Which variables hold a value, through a chain of assignments."""
    rng = draw.rng("ruler vt")
    return hide(tokenizer, "vt", draw, rng, ProblemMaker(rng).tracking(HOPS))


def cwe(tokenizer: Any, draw: Draw) -> Example:
    """The words that stand about equally often in a list, and more often than all others."""
    return _word_list(tokenizer, "cwe", draw, common_share=0.45, decay=0.95)


def fwe(tokenizer: Any, draw: Draw) -> Example:
    """The words that stand in a list most often, each much rarer than the one before."""
    return _word_list(tokenizer, "fwe", draw, common_share=0.6, decay=0.6)


def _word_list(
    tokenizer: Any, subtask: str, draw: Draw, *, common_share: float, decay: float
) -> Example:
    """As many words as fit the length, whatever tokens the model has for them."""
    rng = draw.rng(f"ruler {subtask}")
    state = rng.getstate()
    num_words = draw.num_tokens

    def example() -> Example:
        rng.setstate(state)
        problem: Problem = ProblemMaker(rng).common_words(
            num_words, count=COMMON, common_share=common_share, decay=decay
        )
        return make_example(
            tokenizer, subtask, draw, document=problem.statements[0], problem=problem
        )

    made = example()
    while len(made.prompt.ids) > draw.num_tokens:
        num_words = num_words * draw.num_tokens // len(made.prompt.ids) - 1
        made = example()
    return made


SUBTASKS: Subtasks = {
    "niah_single": niah_single,
    "niah_multikey": niah_multikey,
    "niah_multivalue": niah_multivalue,
    "niah_multiquery": niah_multiquery,
    "vt": vt,
    "cwe": cwe,
    "fwe": fwe,
}
