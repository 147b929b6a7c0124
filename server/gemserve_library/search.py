"""Finds the segments of libraries that a question should be asked behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gemserve.contract.filter_options import CANDIDATES
from gemserve.contract.filter_plan import QueriesRead
from gemserve.filtering.word_ranks import fused
from gemserve_library.library import Index, Library, StoredFile, StoredSegment
from gemserve_library.scan import attention_to_segments

# How much the order by attention counts at least beside that by words: a question that has not seen
# a segment finds less than one that is read behind it.
_ATTENTION = 1 / 4
# A question whose words are in no segment together asks for something in other words. Where the
# best segment has this share of what its words could score, attention counts half as much as words,
# and by the third power more where it has less.
_FEW_WORDS = 0.18
_SMALL = 1 / 8  # of a full segment: what a short one counts as at least

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A segment that a question should be asked behind. `library`: the number of its library.

    `rank`: its place among those that were found, from 0.
    """

    library: int
    file: StoredFile
    segment: StoredSegment
    number: int
    rank: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search has found, in the order of the files. `num_segments`, `num_tokens`: of all."""

    candidates: tuple[Candidate, ...]
    num_segments: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Scores:
    """How well segments of libraries answer a question, by two judges: [segments of all libraries].

    `attention` None: nobody has asked. `words`: 0 where a segment has none of the question's.
    `most_words`: what a segment with all of them would score.
    """

    libraries: Sequence[Library]
    indexes: Sequence[Index]
    attention: Floats | None
    words: Floats
    most_words: float

    def best(self, num_candidates: int) -> Found:
        """The best segments; short ones count for a part."""
        sizes = [len(index.ids) for index in self.indexes]
        order = order_segments(self.attention, self.words, self.most_words)
        of_library = np.repeat(np.arange(len(sizes)), sizes)
        ids = np.concatenate([index.ids for index in self.indexes])
        tokens = np.concatenate([index.sizes for index in self.indexes])
        size = max(library.identity.window for library in self.libraries)
        costs = np.maximum(tokens[order] / size, _SMALL)
        order = order[costs.cumsum() <= max(num_candidates, float(costs[:1].sum()))]
        found: list[Candidate] = []
        for number, library in enumerate(self.libraries):
            is_here = of_library[order] == number
            segments = ids[order[is_here]].tolist()
            ranks = dict(zip(segments, np.flatnonzero(is_here).tolist(), strict=True))
            found += [
                Candidate(
                    library=number,
                    file=file,
                    segment=segment,
                    number=segment_id,
                    rank=ranks[segment_id],
                )
                for segment_id, (file, segment) in library.segments(segments).items()
            ]
        found.sort(key=lambda each: (each.library, each.file.path, each.segment.start))
        return Found(candidates=tuple(found), num_segments=sum(sizes), num_tokens=int(tokens.sum()))


def score_segments(
    libraries: Sequence[Library],
    queries: QueriesRead | None,
    key_head_of: Sequence[int],
    question: str,
) -> Scores:
    """Compare a question with all segments. `queries` None: by words alone."""
    indexes = [library.index() for library in libraries]
    attention = None
    if queries is not None:
        parts = [(index.records, index.starts, index.counts) for index in indexes]
        found = attention_to_segments(queries, key_head_of, parts)
        attention = np.concatenate(found).astype(np.float64)
    pairs = list(zip(libraries, indexes, strict=True))
    words = [_words(library, index, question) for library, index in pairs]
    most = [library.most_by_words(question, index.num_passages) for library, index in pairs]
    return Scores(
        libraries=libraries,
        indexes=indexes,
        attention=attention,
        words=np.concatenate(words),
        most_words=max(most),
    )


def search(
    libraries: Sequence[Library],
    queries: QueriesRead | None,
    key_head_of: Sequence[int],
    question: str,
    num_candidates: int = CANDIDATES,
) -> Found:
    """The best segments for a question: see `score_segments` and `Scores.best`."""
    return score_segments(libraries, queries, key_head_of, question).best(num_candidates)


def _words(library: Library, index: Index, question: str) -> Floats:
    scores = np.zeros(len(index.ids))
    found = library.by_words(question, index.num_passages)
    if found and len(index.ids):  # files may have been added since it was read
        order = np.argsort(index.ids)
        ids = np.array(list(found))
        at = order[np.searchsorted(index.ids, ids, sorter=order).clip(max=len(order) - 1)]
        is_there = index.ids[at] == ids  # a file may have changed meanwhile
        scores[at[is_there]] = np.array(list(found.values()))[is_there]
    return scores


def order_segments(
    attention: Floats | None, words: Floats, most_words: float
) -> npt.NDArray[np.int64]:
    """Indexes of segments, the best first: the two orders are fused as those of passages are."""
    if attention is None:
        order = np.argsort(-words, kind="stable")
        return order[words[order] > 0]
    share = float(words.max(initial=0.0)) / most_words if most_words else 0.0
    weight = max(_ATTENTION, (_FEW_WORDS / max(share, 0.01)) ** 3 / 2)
    best = fused(attention, words, weight)
    return np.lexsort((-attention, -best))
