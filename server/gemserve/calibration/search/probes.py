"""Probes: documents with known answers, which show which heads find them.

Each document gets three questions: about a fact that it hides among others of its form, about a
fact that it does not have, and about all of its text. The first shows whether a head finds the
fact. The others show what attention looks like if nothing can be found.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gemserve.evaluation.tasks.example import Example, ExampleDraw, Maker, question_prompt
from gemserve.evaluation.tasks.natural import NaturalKind, natural_maker
from gemserve.evaluation.tasks.needle import multikey, multiquery
from gemserve.prompting.prompt import Prompt
from gemserve.synthetic.natural_facts import VOCABULARIES, VocabularyName, draw_facts

_NATURAL: tuple[NaturalKind, ...] = ("place", "person", "number", "clause", "several")
# Natural facts, and the built-in model's form of facts for models that know no others.
_SYNTHETIC: dict[str, Maker] = {"multikey": multikey, "multiquery": multiquery}
PROBE_KINDS: tuple[str, ...] = (*_NATURAL, *_SYNTHETIC)
_DIFFUSE = (
    "Summarize the text in one sentence.",
    "What are the most common words in the text?",
    "Is the tone of the text friendly or formal?",
    "How many sentences does the text have?",
    "Which topics does the text cover?",
    "Write a title for the text.",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One document with three questions.

    `example` asks for a fact of the document, `absent` for one that it lacks, `diffuse` for
    something about all of its text.
    """

    kind: str
    example: Example
    absent: Prompt
    diffuse: Prompt

    @property
    def prompts(self) -> list[Prompt]:
        return [self.example.prompt, self.absent, self.diffuse]


def draw_probes(
    tokenizer: Any, vocabulary: VocabularyName, lengths: Sequence[int], samples: int, seed: int
) -> list[Probe]:
    """`samples` probes of each kind and length. Kinds alternate, so any part is balanced."""
    return [
        _draw(tokenizer, vocabulary, kind, draw)
        for length in lengths
        for index in range(samples)
        for kind in PROBE_KINDS
        for draw in [ExampleDraw(seed=seed, num_tokens=length, index=index, samples=samples)]
    ]


def _draw(tokenizer: Any, vocabulary: VocabularyName, kind: str, draw: ExampleDraw) -> Probe:
    maker = _SYNTHETIC.get(kind) or natural_maker(vocabulary, _natural(kind))
    example = maker(tokenizer, draw)
    rng = draw.rng(f"probe {vocabulary} {kind}")
    relations = VOCABULARIES[vocabulary]
    while True:  # a question about something that the document lacks
        problem, _ = draw_facts(rng, rng.choice(relations), 1, 0)
        if not any(answer.text in example.document for answer in problem.answers):
            break
    document = example.document
    return Probe(
        kind=kind,
        example=example,
        absent=question_prompt(tokenizer, document, problem.question),
        diffuse=question_prompt(tokenizer, document, rng.choice(_DIFFUSE)),
    )


def _natural(kind: str) -> NaturalKind:
    return next(known for known in _NATURAL if known == kind)
