"""`ruler`: the task families of RULER that need no download, with generators of our own.

The tasks are retrieval in RULER's one wording (`niah_…`), variable tracking (`vt`), and two
aggregation tasks (`cwe`, `fwe`). No filter can do well in the aggregation tasks, because nothing
can be left out of their documents.

These are as in RULER:

- An answer counts if it contains all that is expected (`--metric contains`).
- The haystacks of three tasks: `niah_single_1` has a few sentences that repeat, `niah_multikey_2`
  has only facts of the form in question, and `niah_multikey_3` has the same with UUIDs as keys and
  values.
- The other `niah` tasks with several keys, values or queries have four.
- `vt` has one chain of four hops, and all five of its variables are expected.
- `fwe` asks for the three most frequent words.

These are different:

- An example is right or wrong as a whole. RULER gives the share of the items found.
- There is no instruction before the document, and no beginning of the answer after the question.
- Filler is the standard library's documentation, not essays.
- Values have three to eight digits; only `niah_multikey_2` has RULER's seven.
- Variables in `vt` are words, in the same filler as needles.
- `cwe` asks for three words, not ten, because small models could not be scored otherwise. These
  words make up 45% of the list and are about equally frequent. Any other word is at most half as
  frequent as the rarest of them (RULER: 30 times against 3).
- In `fwe` each expected word is 0.6 times as frequent as the one before, and other words are at
  most half as frequent as the third. RULER draws coded words from a zeta distribution with
  exponent 2.
"""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any
from uuid import UUID

from gemserve.calibration.search.example import (
    Example,
    ExampleDraw,
    Subtasks,
    make_example,
    question_prompt,
)
from gemserve.synthetic.problems import RULER_WORDING, Answer, Problem, ProblemMaker
from gemserve.synthetic.words import ADJECTIVES, NOUNS
from gemserve_lab.tasks.haystack import hide

KEYS = 4  # facts in the document of `niah_multikey`
ITEMS = 4  # values in one question
HOPS = 4  # hops in the chain of `vt`
COMMON = 3  # expected words in `cwe` and `fwe`
# The haystack of `niah_single_1` repeats these sentences.
NOISE = (
    "The road is long.",
    "The wind is cold.",
    "The lamp is lit.",
    "On we walk.",
    "Over the hill and home again.",
)


def niah_single_1(tokenizer: Any, draw: ExampleDraw) -> Example:
    """One fact in sentences that are repeated."""
    rng = draw.rng("ruler niah_single_1")
    problem = ProblemMaker(rng, wording=RULER_WORDING).single()
    return hide(tokenizer, "niah_single_1", draw, rng, problem, depth=draw.depth, sentences=NOISE)


def niah_single(tokenizer: Any, draw: ExampleDraw) -> Example:
    rng = draw.rng("ruler niah_single")
    problem = ProblemMaker(rng, wording=RULER_WORDING).single()
    return hide(tokenizer, "niah_single", draw, rng, problem, depth=draw.depth)


def niah_multikey(tokenizer: Any, draw: ExampleDraw) -> Example:
    rng = draw.rng("ruler niah_multikey")
    maker = ProblemMaker(rng, wording=RULER_WORDING)
    problem = maker.single()
    others = [maker.single().statements[0] for _ in range(KEYS - 1)]
    return hide(tokenizer, "niah_multikey", draw, rng, problem, others=others)


def niah_multikey_2(tokenizer: Any, draw: ExampleDraw) -> Example:
    """One fact among facts of its form: keys are words, values have seven digits."""

    def key(rng: Random) -> str:
        return f"{rng.choice(ADJECTIVES)}-{rng.choice(NOUNS)}"

    def value(rng: Random) -> str:
        return str(rng.randrange(10**6, 10**7))

    return _facts(tokenizer, "niah_multikey_2", draw, "magic number", key, value)


def niah_multikey_3(tokenizer: Any, draw: ExampleDraw) -> Example:
    """Like `niah_multikey_2` with UUIDs for keys and values."""

    def uuid(rng: Random) -> str:
        return str(UUID(int=rng.getrandbits(128), version=4))

    return _facts(tokenizer, "niah_multikey_3", draw, "magic uuid", uuid, uuid)


def _facts(
    tokenizer: Any,
    subtask: str,
    draw: ExampleDraw,
    attribute: str,
    draw_key: Callable[[Random], str],
    draw_value: Callable[[Random], str],
) -> Example:
    """A document of as many facts as fit the length, and a question about one of them."""
    rng = draw.rng(f"ruler {subtask}")
    form = RULER_WORDING.statements[0]
    room = draw.num_tokens
    lines: list[str] = []
    facts: dict[str, str] = {}
    problem = Problem(kind=subtask, statements=(), question="", answers=(), gold=())
    while True:
        key, value = draw_key(rng), draw_value(rng)
        if key in facts or value in facts.values():
            continue
        line = form.format(subject=key, attribute=attribute, value=value)
        if not lines:
            question = RULER_WORDING.questions[0].format(subject=key, attribute=attribute)
            answer = Answer(value, 0, line.rindex(value))
            problem = Problem(
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
    return make_example(tokenizer, subtask, draw, document="\n".join(lines), problem=problem)


def niah_multivalue(tokenizer: Any, draw: ExampleDraw) -> Example:
    rng = draw.rng("ruler niah_multivalue")
    problem = ProblemMaker(rng, wording=RULER_WORDING).multi_value(ITEMS)
    return hide(tokenizer, "niah_multivalue", draw, rng, problem)


def niah_multiquery(tokenizer: Any, draw: ExampleDraw) -> Example:
    rng = draw.rng("ruler niah_multiquery")
    problem = ProblemMaker(rng, wording=RULER_WORDING).multi_query(ITEMS)
    return hide(tokenizer, "niah_multiquery", draw, rng, problem)


def vt(tokenizer: Any, draw: ExampleDraw) -> Example:
    """Ask which variables hold a value, through a chain of assignments."""
    rng = draw.rng("ruler vt")
    return hide(tokenizer, "vt", draw, rng, ProblemMaker(rng).tracking(HOPS))


def cwe(tokenizer: Any, draw: ExampleDraw) -> Example:
    """Ask for words that are about equally frequent in a list, and more frequent than others."""
    return _word_list(tokenizer, "cwe", draw, common_share=0.45, decay=0.95)


def fwe(tokenizer: Any, draw: ExampleDraw) -> Example:
    """Ask for the most frequent words in a list, each much rarer than the one before."""
    return _word_list(tokenizer, "fwe", draw, common_share=0.6, decay=0.6)


def _word_list(
    tokenizer: Any, subtask: str, draw: ExampleDraw, *, common_share: float, decay: float
) -> Example:
    """As many words as fit the length, however many tokens they have."""
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
