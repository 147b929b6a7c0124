"""What the built-in model can and cannot do: the table of its model card.

Facts of one kind among distractors of the same kind in 1,024 tokens of filler and one question,
read whole (`none`) and filtered (`sieve`, 256 tokens kept). An answer is right if it contains the
value.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.shared import results
from gemserve.calibration.search.example import Example
from gemserve.config import EngineConfig, ModelConfig
from gemserve.engine.build import build_core
from gemserve.prompting.prompt import chat_prompt
from gemserve.synthetic.facts import Needle, draw_needles
from gemserve.synthetic.prose import stdlib_sentences
from gemserve_lab.run import average, run_example
from gemserve_lab.tasks.haystack import draw_filler

KEEP = 256
Draw = Callable[[Random], list[Needle]]


def reworded(rng: Random, statement: str, question: str) -> list[Needle]:
    """Two needles in words the model was not trained on."""
    return [
        Needle(
            subject=n.subject,
            attribute=n.attribute,
            value=n.value,
            statement=statement.format(subject=n.subject, attribute=n.attribute, value=n.value),
            question=question.format(subject=n.subject, attribute=n.attribute),
        )
        for n in draw_needles(rng, 2)
    ]


def renamed(rng: Random) -> list[Needle]:
    """Two needles about words outside the training vocabulary."""
    names = ("quokka", "zeppelin", "marmalade", "Ophelia", "trombone", "Saskatoon", "flugelhorn")
    chosen = rng.sample(names, 2)
    made: list[Needle] = []
    for n, name in zip(draw_needles(rng, 2), chosen, strict=True):
        made.append(
            Needle(
                subject=name,
                attribute=n.attribute,
                value=n.value,
                statement=n.statement.replace(n.subject, name),
                question=n.question.replace(n.subject, name),
            )
        )
    return made


SKILLS: dict[str, Draw] = {
    "1 fact": lambda rng: draw_needles(rng, 1),
    "4 facts": lambda rng: draw_needles(rng, 4),
    "8 facts": lambda rng: draw_needles(rng, 8),
    "values with letters": lambda rng: draw_needles(rng, 2, letters=1.0),
    "subjects of two words": lambda rng: draw_needles(rng, 2, two_words=1.0),
    "subjects it was not trained on": renamed,
    "a new wording of the statement": lambda rng: reworded(
        rng,
        "Somebody wrote that the {subject} goes with the {attribute} {value}.",
        "What is the {attribute} for the {subject}?",
    ),
    "a new wording of the question": lambda rng: reworded(
        rng,
        "The {attribute} for the {subject} is {value}.",
        "Could you say which {attribute} the {subject} has?",
    ),
    "the value before the subject": lambda rng: reworded(
        rng,
        "{value} is the {attribute} for the {subject}.",
        "What is the {attribute} for the {subject}?",
    ),
}


def example(tokenizer: Any, draw: Draw, index: int) -> Example:
    rng = Random(f"builtin {index}")
    needles = draw(rng)
    asked = needles[0]
    pieces = draw_filler(tokenizer, stdlib_sentences(), 800, rng)
    for needle in needles:
        pieces.insert(rng.randrange(len(pieces) + 1), needle.statement)
    content = f"{' '.join(pieces)}\n\n{asked.question}"
    prompt = chat_prompt(tokenizer, [{"role": "user", "content": content}])
    at = prompt.text.index(asked.statement)
    inside = range(at, at + len(asked.statement))
    tokens = {t for c in inside if (t := prompt.encoding.char_to_token(c)) is not None}
    return Example(
        subtask="skill",
        num_tokens=1024,
        index=index,
        prompt=prompt,
        question=asked.question,
        answers=(asked.value,),
        gold=((min(tokens), max(tokens) + 1),),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--samples", type=int, default=50, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="only the result line")
    arguments = parser.parse_args()
    core = build_core(ModelConfig(device="cpu"), EngineConfig(filter_min_tokens=0))
    rows: list[dict[str, Any]] = []
    for skill, draw in SKILLS.items():
        results.note(skill)
        examples = [example(core.tokenizer, draw, i) for i in range(arguments.samples)]
        outcomes = [
            outcome
            for one in examples
            for outcome in run_example(core, one, arguments.samples, ("none", "sieve"), KEEP)
        ]
        none, sieve = average(outcomes)
        rows.append(
            {"skill": skill, "none": none.score, "sieve": sieve.score, "recall": sieve.recall}
        )
    results.finish("builtin", "cpu", rows, arguments.json)


if __name__ == "__main__":
    main()
