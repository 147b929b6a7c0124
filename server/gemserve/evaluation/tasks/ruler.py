"""`ruler`: the task families of RULER that need no download, from generators of our own.

Retrieval in RULER's one wording (`niah_…`), variable tracking (`vt`), and two aggregation tasks
(`cwe`, `fwe`), in which nothing can be left out of the document: no filter can do well there.

What is as in RULER: an answer counts if all that is expected stands in it (`--metric contains`);
the haystacks of `niah_single_1` (a few sentences over and over), of `niah_multikey_2` (nothing but
facts of the asked form) and of `niah_multikey_3` (the same with UUIDs as keys and values); four
keys, values or queries in the other `niah` tasks with several; in `vt` one chain of four hops, all
five variables of which are expected; in `fwe` the three most frequent words are asked for.

What is not: an example is right or wrong as a whole, where RULER gives the share of the items
found. There is no instruction before the document and no beginning of the answer after the
question. Filler is the standard library's documentation, not essays. Values are of three to eight
digits, but in `niah_multikey_2`, where they have RULER's seven. Variables in `vt` are words, and
stand in the same filler as needles. `cwe` asks for three words, not ten, so that small models can
be scored at all: they make up 45% of the list and are about equally frequent, and any other word
stands there at most half as often as the rarest of them (RULER: 30 times against 3). In `fwe`
frequencies fall by the factor 0.6 from one asked word to the next, and other words are at most half
as frequent as the third (RULER draws coded words from a zeta distribution with exponent 2).
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any
from uuid import UUID

from gemserve.evaluation.tasks.example import Draw, Example, Subtasks, make_example, question_prompt
from gemserve.evaluation.tasks.haystack import hide
from gemserve.synthetic.problems import RULER_WORDING, Answer, Problem, ProblemMaker
from gemserve.synthetic.words import ADJECTIVES, NOUNS

KEYS = 4  # facts in the document of `niah_multikey`
ITEMS = 4  # values asked for at once
HOPS = 4  # copies in the chain of `vt`
COMMON = 3  # words asked for in `cwe` and `fwe`
# Says nothing, over and over: the haystack of `niah_single_1`.
NOISE = (
    "The road is long.",
    "The wind is cold.",
    "The lamp is lit.",
    "On we walk.",
    "Over the hill and home again.",
)


def niah_single_1(tokenizer: Any, draw: Draw) -> Example:
    """One fact in sentences that are repeated over and over."""
    rng = draw.rng("ruler niah_single_1")
    problem = ProblemMaker(rng, wording=RULER_WORDING).single()
    return hide(tokenizer, "niah_single_1", draw, rng, problem, depth=draw.depth, sentences=NOISE)


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


def niah_multikey_2(tokenizer: Any, draw: Draw) -> Example:
    """One fact among nothing but facts of its form: words for keys, seven digits for values."""

    def key(rng: Random) -> str:
        return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"

    def value(rng: Random) -> str:
        return str(rng.randrange(10**6, 10**7))

    return _facts(tokenizer, "niah_multikey_2", draw, "magic number", key, value)


def niah_multikey_3(tokenizer: Any, draw: Draw) -> Example:
    """The same with UUIDs for keys and values."""

    def uuid(rng: Random) -> str:
        return str(UUID(int=rng.getrandbits(128), version=4))

    return _facts(tokenizer, "niah_multikey_3", draw, "magic uuid", uuid, uuid)


def _facts(
    tokenizer: Any,
    subtask: str,
    draw: Draw,
    attribute: str,
    draw_key: Callable[[Random], str],
    draw_value: Callable[[Random], str],
) -> Example:
    """A document of as many facts as fit the length, of which one is asked for."""
    rng = draw.rng(f"ruler {subtask}")
    form = RULER_WORDING.statements[0]
    room = draw.num_tokens
    lines: list[str] = []
    facts: dict[str, str] = {}
    asked = Problem(kind=subtask, statements=(), question="", answers=(), gold=())
    while True:
        key, value = draw_key(rng), draw_value(rng)
        if key in facts or value in facts.values():
            continue
        line = form.format(subject=key, attribute=attribute, value=value)
        if not lines:
            question = RULER_WORDING.questions[0].format(subject=key, attribute=attribute)
            answer = Answer(value, 0, line.rindex(value))
            asked = Problem(
                kind=subtask, statements=(line,), question=question, answers=(answer,), gold=(0,)
            )
            room -= len(question_prompt(tokenizer, "", question).ids)
        encoded = tokenizer.backend_tokenizer.encode(line + "\n", add_special_tokens=False)
        room -= len(encoded.ids)
        if room < 0 and lines:
            break
        facts[key] = value
        lines.append(line)
    lines.insert(rng.randrange(len(lines)), lines.pop(0))
    return make_example(tokenizer, subtask, draw, document="\n".join(lines), problem=asked)


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
    "niah_single_1": niah_single_1,
    "niah_multikey_2": niah_multikey_2,
    "niah_multikey_3": niah_multikey_3,
    "niah_multivalue": niah_multivalue,
    "niah_multiquery": niah_multiquery,
    "vt": vt,
    "cwe": cwe,
    "fwe": fwe,
}
