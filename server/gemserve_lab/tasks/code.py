"""Code as the document: functions of the standard library, and a question about a default.

The function in question and others of its form, with other names and defaults, are written for this
task. They are at random places among the functions of Python's own files, all in one fenced block.
"""

from __future__ import annotations

from random import Random
from typing import Any

from gemserve.calibration.search.example import Example, ExampleDraw, make_example, question_prompt
from gemserve.synthetic.code import stdlib_functions
from gemserve.synthetic.problems import Answer, Problem

DISTRACTORS = 3
_VERBS = ("open", "load", "send", "merge", "scan", "reset", "build", "trace")
_NOUNS = ("channel", "ledger", "beacon", "parcel", "ticket", "sensor", "invoice", "voucher")
_ARGUMENTS = ("retries", "timeout", "batch_size", "max_items", "delay", "window", "depth", "quota")
_QUESTIONS = (
    "What is the default of `{argument}` in `{function}`?",
    "Which default value does `{argument}` have in the function `{function}`?",
)


def code(tokenizer: Any, draw: ExampleDraw) -> Example:
    """Ask for the default of an argument and for the value of a constant, in turn."""
    rng = draw.rng("needle code")
    problem, others = draw_definitions(rng, is_constant=draw.index % 2 == 1)
    pieces = [*problem.statements, *others]
    functions = stdlib_functions()
    start = rng.randrange(len(functions))
    frame = len(question_prompt(tokenizer, _fence(pieces), problem.question).ids)
    room = draw.num_tokens - frame - 8
    filler: list[str] = []
    for i in range(len(functions)):
        # add functions that fit, and skip longer ones, until little room is left
        function = functions[(start + i) % len(functions)]
        count = _count(tokenizer, function) + 3  # blank lines after the function
        if count <= room:
            filler.append(function)
            room -= count
        if room < draw.num_tokens // 50:
            break
    places = sorted(rng.randint(0, len(filler)) for _ in pieces)
    rng.shuffle(pieces)
    for place, piece in reversed([*zip(places, pieces, strict=True)]):
        filler.insert(place, piece)
    return make_example(tokenizer, "code", draw, document=_fence(filler), problem=problem)


def draw_definitions(rng: Random, *, is_constant: bool) -> tuple[Problem, list[str]]:
    """The definition in question, and others of its form with other names."""
    total = 1 + DISTRACTORS
    argument = rng.choice(_ARGUMENTS)
    names = [
        f"{verb}_{noun}"
        for verb, noun in zip(rng.sample(_VERBS, total), rng.sample(_NOUNS, total), strict=True)
    ]
    values = [str(value) for value in rng.sample(range(11, 990), total)]
    if is_constant:
        names = [f"{name}_{argument}".upper() for name in names]
        texts = [f"{name} = {value}" for name, value in zip(names, values, strict=True)]
        question = f"What is the value of the constant `{names[0]}`?"
    else:
        texts = [
            f"def {name}(target, {argument}={value}):\n    return start(target, {argument})"
            for name, value in zip(names, values, strict=True)
        ]
        question = rng.choice(_QUESTIONS).format(argument=argument, function=names[0])
    problem = Problem(
        kind="code",
        statements=(texts[0],),
        question=question,
        answers=(Answer(values[0], 0, texts[0].index(values[0])),),
        gold=(0,),
    )
    return problem, texts[1:]


def _fence(pieces: list[str]) -> str:
    body = "\n\n\n".join(pieces)
    return f"```python\n{body}\n```"


def _count(tokenizer: Any, text: str) -> int:
    return len(tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
