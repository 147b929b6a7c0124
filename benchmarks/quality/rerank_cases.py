"""Questions with the passages that a retriever could have found, one or a few of which answer them.

`real` and `held_out` are the questions of `real_documents.py`: the candidates are passages of the
question's own document, and the gold ones are those that hold its gold paragraphs. Half of the
others are what BM25 ranks highest among the wrong ones, and the rest are drawn from the document.
`facts`, `more_facts` and `near_misses` hide a natural fact in one of fifty passages of
documentation; further passages have facts of the same form about other subjects. Of `sentences`
and `more_sentences` each candidate is a single sentence.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import numpy.typing as npt

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.quality import real_documents
from gemserve.filtering.word_ranks import word_scores
from gemserve.prompting.word_places import find_word_places
from gemserve.synthetic.natural_facts import (
    FILLERS,
    KINDS,
    VOCABULARIES,
    VocabularyName,
    draw_facts,
    lead_in,
)
from gemserve.synthetic.vocabulary import Relation
from gemserve.synthetic.words_near_misses import NEAR_MISSES
from gemserve_lab.tasks.natural import LEADS

CHOSEN_ON = ("real", "facts", "sentences")
CONFIRMED_ON = ("held_out", "more_facts", "near_misses", "more_sentences")
SETS = (*CHOSEN_ON, *CONFIRMED_ON)
CANDIDATES = 50
FACTS = 24  # questions of each set of facts
SHORTEST, LONGEST = 64, 320  # tokens of a passage of a document, estimated; paragraphs stay whole
OTHER_FACTS = 9  # passages with a fact of the same form
SENTENCES = (3, 6)  # of a passage of documentation
_WORD = re.compile(r"\w+")
_K1, _B = 1.2, 0.75  # Lucene's


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """`gold`: indexes of the passages that answer the question."""

    question: str
    passages: tuple[str, ...]
    gold: frozenset[int]


def cases(name: str) -> list[Case]:
    """The cases of one of `SETS`. Questions about documents that are not here are left out."""
    if name == "real":
        return _of_documents(real_documents.QUESTIONS)
    if name == "held_out":
        return _of_documents(real_documents.HELD_OUT)
    if name == "near_misses":
        return [_fact(name, i, NEAR_MISSES[i % len(NEAR_MISSES)]) for i in range(FACTS)]
    vocabulary = VOCABULARIES[_vocabulary_of(name)]
    found = []
    for index in range(FACTS):
        relations = [r for r in vocabulary if r.kind == KINDS[index % len(KINDS)]]
        found.append(_fact(name, index, relations[index // len(KINDS) % len(relations)]))
    return found


def _vocabulary_of(name: str) -> VocabularyName:
    return "confirmation" if name in CHOSEN_ON else "evaluation"


def _of_documents(path: Path) -> list[Case]:
    found: list[Case] = []
    for index, question in enumerate(real_documents.read_questions(path)):
        try:
            text = real_documents.read_document(question.source)
            paragraphs = real_documents.split_paragraphs(text)
            gold = real_documents.find_gold(text, paragraphs, question.gold)
        except real_documents.LeftOut:
            continue
        ranges = _joined(paragraphs)
        passages = [text[paragraphs[first].start : paragraphs[last].stop] for first, last in ranges]
        is_gold = [first <= gold[1] and gold[0] <= last for first, last in ranges]
        found.append(_sampled(question.question, passages, is_gold, Random(index)))
    return found


def _joined(paragraphs: Sequence[real_documents.Paragraph]) -> list[tuple[int, int]]:
    """The first and the last paragraph of each passage."""
    ranges: list[tuple[int, int]] = []
    size = LONGEST
    for index, paragraph in enumerate(paragraphs):
        if size < SHORTEST and size + paragraph.num_tokens <= LONGEST:
            ranges[-1] = ranges[-1][0], index
            size += paragraph.num_tokens
        else:
            ranges.append((index, index))
            size = paragraph.num_tokens
    return ranges


def _sampled(question: str, passages: Sequence[str], is_gold: Sequence[bool], rng: Random) -> Case:
    """At most `CANDIDATES` of a document's passages, in their order."""
    gold = [i for i, is_right in enumerate(is_gold) if is_right]
    wrong = [i for i, is_right in enumerate(is_gold) if not is_right]
    by_words = bm25(question, passages)
    room = CANDIDATES - len(gold)
    hard = sorted(wrong, key=lambda i: -by_words[i])[: room // 2]
    others = [i for i in wrong if i not in hard]
    chosen = sorted([*gold, *hard, *rng.sample(others, min(len(others), room - len(hard)))])
    return Case(
        question=question,
        passages=tuple(passages[i] for i in chosen),
        gold=frozenset(chosen.index(i) for i in gold),
    )


def _fact(name: str, index: int, relation: Relation) -> Case:
    rng, vocabulary = Random(f"{name} {index}"), _vocabulary_of(name)
    most = min(OTHER_FACTS, len(relation.subjects) - 1, len(relation.values) - 1)
    problem, others = draw_facts(rng, relation, 1, most)
    sentences, statements = FILLERS[vocabulary](), [problem.statements[0], *others]
    passages: list[str] = []
    for number in range(CANDIDATES):
        has_fact, is_single = number < len(statements), name.endswith("sentences")
        count = int(not has_fact) if is_single else rng.randint(*SENTENCES)
        at = rng.randrange(len(sentences) - count)
        text = list(sentences[at : at + count])
        if has_fact:
            text.insert(rng.randint(0, count), statements[number])
        passages.append(" ".join(text))
    order = rng.sample(range(CANDIDATES), CANDIDATES)
    return Case(
        question=lead_in(rng.choice(LEADS[vocabulary]), problem.question),
        passages=tuple(passages[i] for i in order),
        gold=frozenset({order.index(0)}),
    )


def bm25(question: str, passages: Sequence[str]) -> npt.NDArray[np.float64]:
    """Okapi BM25 with Lucene's settings and logarithm, of words in any case: [passages]."""
    words = [[word.casefold() for word in _WORD.findall(passage)] for passage in passages]
    mean = sum(map(len, words)) / len(words)
    scores = np.zeros(len(passages))
    for term in {word.casefold() for word in _WORD.findall(question)}:
        counts = np.array([each.count(term) for each in words], dtype=np.float64)
        having = (counts > 0).sum()
        rarity = np.log1p((len(words) - having + 0.5) / (having + 0.5))
        lengths = np.array([len(each) for each in words]) / mean
        scores += rarity * counts * (_K1 + 1) / (counts + _K1 * (1 - _B + _B * lengths))
    return scores


def sieve_words(question: str, passages: Sequence[str]) -> npt.NDArray[np.float64]:
    """What the filter `sieve` ranks passages by beside attention: [passages]."""
    starts: list[int] = []
    firsts: list[int] = []
    text = ""
    for passage in passages:
        firsts.append(len(starts))
        starts += [len(text) + found.start() for found in re.finditer(r"\w+|\W+", passage)]
        text += passage + "\n\n"
    count = len(starts)
    places = find_word_places(
        text + question, np.array([*starts, len(text)], dtype=np.int64), [(count, count + 1)]
    )
    lengths = np.diff(np.append(firsts, count))
    return word_scores([p[p < count] for p in places], np.array(firsts, dtype=np.int64), lengths)
