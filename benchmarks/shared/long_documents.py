"""Several questions about one very long document, for the tasks whose facts stand in prose.

The filler is all prose that is here: the language reference (45,000 tokens of SmolLM2), the
documentation strings of the standard library (330,000) and, where these are not enough, those of
torch, transformers and sympy. Without the last three a document of a million tokens would repeat
its sentences.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

from gemserve.calibration.search.example import Example, ExampleDraw
from gemserve.synthetic.natural_facts import VOCABULARIES
from gemserve.synthetic.prose import docstring_sentences, stdlib_sentences, topics_sentences
from gemserve.synthetic.words_near_misses import NEAR_MISSES
from gemserve_lab.tasks.haystack import Placed, draw_filler, example_of, scatter
from gemserve_lab.tasks.linked import MOST_DEFINITIONS, draw_definitions, draw_pair
from gemserve_lab.tasks.natural import draw_natural, draw_near_misses
from gemserve_lab.tasks.words_linked import LINKS

PACKAGES = ("torch", "transformers", "sympy")
_OWN_TOKENS = 300_000  # a document of so many tokens does without `PACKAGES`
_QUESTION_TOKENS = 100  # of a question and the chat template, at most


def _natural(rng: Random, count: int) -> list[Placed]:
    relations = rng.sample(VOCABULARIES["evaluation"], count)
    return [draw_natural(rng, r, _depth(rng, i, count)) for i, r in enumerate(relations)]


def _near_misses(rng: Random, count: int) -> list[Placed]:
    relations = rng.sample(NEAR_MISSES, count)
    return [draw_near_misses(rng, r, _depth(rng, i, count)) for i, r in enumerate(relations)]


def _pairs(rng: Random, count: int) -> list[Placed]:
    links = rng.sample(LINKS, count)
    return [draw_pair(rng, link, is_linked_last=i % 2 == 0) for i, link in enumerate(links)]


def _depth(rng: Random, index: int, count: int) -> float:
    return (index + rng.random()) / count


# Draws the problems of one document. Each has a relation of its own, so that no fact contradicts
# another.
_DRAWS: dict[str, Callable[[Random, int], list[Placed]]] = {
    "natural": _natural,
    "near_misses": _near_misses,
    "pairs": _pairs,
    "far_definition": draw_definitions,
}
MOST_QUESTIONS = {
    "natural": len(VOCABULARIES["evaluation"]),
    "near_misses": len(NEAR_MISSES),
    "pairs": len(LINKS),
    "far_definition": MOST_DEFINITIONS,
}


def draw_examples(
    tokenizer: Any, task: str, num_tokens: int, count: int, seed: int
) -> Iterator[Example]:
    """Examples of one task about the same document; only one at a time is in memory."""
    rng = Random(f"long {task} {num_tokens} {seed}")
    problems = _DRAWS[task](rng, count)
    statements = [pair for placed in problems for pair in placed.statements]
    encode = tokenizer.backend_tokenizer.encode
    used = sum(len(encode(text, add_special_tokens=False).ids) + 2 for _, text in statements)
    room = num_tokens - used - _QUESTION_TOKENS
    filler = draw_filler(tokenizer, prose(num_tokens), room, rng, is_tight=True)
    document = scatter(filler, statements)
    del filler
    for index, placed in enumerate(problems):
        draw = ExampleDraw(seed=seed, num_tokens=num_tokens, index=index, samples=count)
        yield example_of(tokenizer, task, draw, placed, document)


def prose(num_tokens: int) -> tuple[str, ...]:
    """All sentences that a document of so many tokens is filled with."""
    own = (*topics_sentences(), *stdlib_sentences())
    return own if num_tokens <= _OWN_TOKENS else (*own, *_package_sentences())


@cache
def _package_sentences() -> tuple[str, ...]:
    """Takes about forty seconds."""
    return tuple(docstring_sentences([path for name in PACKAGES for path in _files(name)]))


def _files(name: str) -> list[Path]:
    found = importlib.util.find_spec(name)
    if found is None or found.origin is None:
        return []
    files = sorted(Path(found.origin).parent.rglob("*.py"))
    return [path for path in files if "tests" not in path.parts]
