"""Probes: documents with known answers, which show which heads find them.

A document hides several facts, and each gets its question. Some questions repeat the words of their
fact ("words"), others share none with it ("meaning"): heads that find the former are in the first
layers of every model, and only deeper ones find the latter. Two more questions follow, one about a
fact that the document does not have, and one about all of its text. They show what attention looks
like if nothing can be found.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from random import Random
from typing import Any

from gemserve.calibration.search.example import Example, find_spans, question_prompt
from gemserve.prompting.prompt import Prompt
from gemserve.synthetic.code import stdlib_functions
from gemserve.synthetic.meaning_facts import (
    MEANING_KINDS,
    PROSE_KINDS,
    MeaningFact,
    facts_in,
    filler_in,
    languages_of,
    meaning_facts,
)
from gemserve.synthetic.natural_facts import (
    FILLERS,
    KINDS,
    SEVERAL,
    VOCABULARIES,
    VocabularyName,
    draw_facts,
)
from gemserve.synthetic.problems import ProblemMaker

WORD_KINDS: tuple[str, ...] = (*KINDS, "several", "multikey", "multiquery")
PROBE_KINDS: tuple[str, ...] = (*WORD_KINDS, *MEANING_KINDS)
_NATURAL: tuple[str, ...] = (*KINDS, "several")
_WORD_QUESTIONS = 3  # of a document in English prose
_DISTRACTORS = 2  # further facts of the same form, for each of these
_CODES = 6  # facts of the built-in model's form in a document
_PARAGRAPH = 5  # sentences
_ANSWER_TOKENS = 24
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
    """One document with several questions.

    `subject`: what its facts are in: English prose, code, tables, another language, or the built-in
    model's form. `examples`: a question each, about a fact of the document; the subtask of an
    example is its kind. `absent` asks for a fact that the document lacks, `diffuse` for something
    about all of its text.
    """

    subject: str
    examples: tuple[Example, ...]
    absent: Prompt
    diffuse: Prompt

    @property
    def prompts(self) -> list[Prompt]:
        return [*(example.prompt for example in self.examples), self.absent, self.diffuse]


@dataclass(frozen=True, slots=True)
class _Asked:
    """A question of a document. `gold`: the passages that it needs, in their order there."""

    kind: str
    question: str
    answers: tuple[str, ...]
    gold: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Content:
    """What a document is made of: its pieces in any order, filler, and the question it lacks.

    The statements of one piece stay in their order and together.
    """

    asked: list[_Asked]
    pieces: list[str]
    absent: str
    filler: Sequence[str]
    join: Callable[[Sequence[str]], str]


def prepare_texts() -> None:
    """Read the texts that probes are made of, which takes seconds once for each process."""
    FILLERS["calibration"]()
    stdlib_functions()


def draw_probes(
    tokenizer: Any,
    vocabulary: VocabularyName,
    lengths: Sequence[int],
    samples: int,
    seed: int,
    pause: Callable[[], None] = lambda: None,
) -> list[Probe]:
    """`samples` documents in English prose of each length, and as many others in turn.

    The others are in the built-in model's form, in code, in tables, and in each language that the
    vocabulary has. Both sorts alternate, so any part of the probes is balanced. `pause` is called
    behind each document.
    """
    others = ("codes", "code", "tables", *languages_of(vocabulary))
    probes: list[Probe] = []
    numbers = count()
    for length in lengths:
        for _ in range(samples):
            number = next(numbers)
            turn, place = divmod(number, len(others))
            for subject, of_subject in (("prose", number), (others[place], turn)):
                rng = Random(f"probe {vocabulary} {subject} {seed} {length} {number}")
                probes.append(_draw(tokenizer, vocabulary, subject, length, of_subject, rng))
                pause()
    return probes


def _draw(
    tokenizer: Any, vocabulary: VocabularyName, subject: str, length: int, number: int, rng: Random
) -> Probe:
    if subject == "prose":
        content = _prose(vocabulary, number, rng)
    elif subject == "codes":
        content = _codes(vocabulary, rng)
    elif subject in ("code", "tables"):
        content = _blocks(vocabulary, subject, number, rng)
    else:
        content = _in_language(vocabulary, subject, rng)
    document = _document(tokenizer, content, length, rng)
    examples = []
    for asked in content.asked:
        prompt = question_prompt(tokenizer, document, asked.question)
        golds = sorted(asked.gold, key=document.index)
        examples.append(
            Example(
                subtask=asked.kind,
                num_tokens=length,
                index=number,
                prompt=prompt,
                question=asked.question,
                answers=asked.answers,
                gold=find_spans(prompt, golds),
                max_tokens=_ANSWER_TOKENS,
                document=document,
            )
        )
    return Probe(
        subject=subject,
        examples=tuple(examples),
        absent=question_prompt(tokenizer, document, content.absent),
        diffuse=question_prompt(tokenizer, document, rng.choice(_DIFFUSE)),
    )


def _prose(vocabulary: VocabularyName, number: int, rng: Random) -> _Content:
    """A fact by meaning of each kind, and some by words, each with others of its form."""
    facts = meaning_facts(vocabulary)
    by_kind = [[fact for fact in facts if fact.kind == kind] for kind in PROSE_KINDS]
    chosen = [of_kind[number % len(of_kind)] for of_kind in by_kind]
    asked, pieces = _by_meaning(chosen)
    relations = rng.sample(VOCABULARIES[vocabulary], _WORD_QUESTIONS)
    for place, relation in enumerate(relations):
        kind = _NATURAL[(number * _WORD_QUESTIONS + place) % len(_NATURAL)]
        if kind != "several":
            relation = rng.choice([r for r in VOCABULARIES[vocabulary] if r.kind == kind])
        wanted = SEVERAL if kind == "several" else 1
        problem, distractors = draw_facts(rng, relation, wanted, _DISTRACTORS)
        if any(set(problem.statements) & set(other.gold) for other in asked):
            continue
        answers = tuple(answer.text for answer in problem.answers)
        asked.append(_Asked(kind, problem.question, answers, problem.statements))
        pieces += [*problem.statements, *distractors]
    absent = by_kind[number % len(by_kind)]
    return _Content(
        asked=asked,
        pieces=list(dict.fromkeys(pieces)),
        absent=absent[(number + 1) % len(absent)].question,
        filler=_consecutive(FILLERS[vocabulary](), rng),
        join=_paragraphs,
    )


def _codes(vocabulary: VocabularyName, rng: Random) -> _Content:
    """Facts of the built-in model's form: one is asked for, and two together."""
    maker = ProblemMaker(rng)
    one, several = maker.single(), maker.multi_query(SEVERAL)
    others = [maker.single() for _ in range(_CODES)]
    asked = [
        _Asked(kind, problem.question, tuple(a.text for a in problem.answers), problem.statements)
        for kind, problem in (("multikey", one), ("multiquery", several))
    ]
    pieces = [*one.statements, *several.statements]
    pieces += [statement for other in others for statement in other.statements]
    absent = maker.single().question
    return _Content(asked, pieces, absent, _consecutive(FILLERS[vocabulary](), rng), _paragraphs)


def _blocks(vocabulary: VocabularyName, subject: str, number: int, rng: Random) -> _Content:
    """Every other function or table, between other functions or among sentences."""
    kind = "code" if subject == "code" else "table"
    facts = [fact for fact in meaning_facts(vocabulary) if fact.kind == kind]
    chosen = facts[number % 2 :: 2]
    others = [fact for fact in facts if fact not in chosen]
    asked, pieces = _by_meaning(chosen)
    absent = rng.choice(others).question
    if kind == "code":
        return _Content(asked, pieces, absent, _consecutive(stdlib_functions(), rng), _functions)
    # a table is a paragraph of its own
    pieces = [f"\n\n{piece}\n\n" if "\n" in piece else piece for piece in pieces]
    return _Content(asked, pieces, absent, _consecutive(FILLERS[vocabulary](), rng), _paragraphs)


def _in_language(vocabulary: VocabularyName, language: str, rng: Random) -> _Content:
    """All facts of a language but one, which is asked for although it is not there."""
    facts = list(facts_in(language, vocabulary))
    absent = facts.pop(rng.randrange(len(facts)))
    asked, pieces = _by_meaning(facts)
    joint = "" if language in ("Chinese", "Japanese") else " "
    filler = _consecutive(filler_in(language), rng)
    return _Content(asked, pieces, absent.question, filler, lambda texts: _paragraphs(texts, joint))


def _by_meaning(facts: Sequence[MeaningFact]) -> tuple[list[_Asked], list[str]]:
    asked = [_Asked(fact.kind, fact.question, (fact.answer,), (fact.gold,)) for fact in facts]
    return asked, [text for fact in facts for text in (fact.fact, fact.decoy)]


def _document(tokenizer: Any, content: _Content, length: int, rng: Random) -> str:
    """A document for prompts of about `length` tokens, with the pieces at random places."""
    encode = tokenizer.backend_tokenizer.encode_batch
    pieces = list(content.pieces)
    rng.shuffle(pieces)
    questions = [asked.question for asked in content.asked]
    used = sum(len(e.ids) + 1 for e in encode(pieces, add_special_tokens=False))
    used += max(len(e.ids) for e in encode(questions, add_special_tokens=False))
    room = length - used - len(question_prompt(tokenizer, "", "").ids)
    filler: list[str] = []
    for text in content.filler:
        room -= len(encode([" " + text], add_special_tokens=False)[0].ids)
        if room < 0:
            break
        filler.append(text)
    for piece in pieces:
        filler.insert(rng.randint(0, len(filler)), piece)
    return content.join(filler)


def _consecutive(texts: Sequence[str], rng: Random) -> list[str]:
    start = rng.randrange(len(texts))
    return [*texts[start:], *texts[:start]]


def _paragraphs(texts: Sequence[str], joint: str = " ") -> str:
    parts = [texts[i : i + _PARAGRAPH] for i in range(0, len(texts), _PARAGRAPH)]
    paragraphs = [joint.join(part) for part in parts]
    lines = "\n\n".join(paragraphs).split("\n\n")
    return "\n\n".join(line.strip() for line in lines if line.strip())


def _functions(texts: Sequence[str]) -> str:
    body = "\n\n\n".join(texts)
    return f"```python\n{body}\n```"
