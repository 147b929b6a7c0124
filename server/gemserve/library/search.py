"""Finds the windows of libraries that a question should be asked behind."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gemserve.filter_plan import QueriesRead
from gemserve.filtering.word_ranks import fused
from gemserve.library.scan import attention_to_windows
from gemserve.library.store import Index, Library, StoredFile, StoredWindow
from gemserve.types import CANDIDATES

_SMALL = 1 / 8  # of a full window: what a short one counts as at least

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A window that a question should be asked behind. `library`: the number of its library."""

    library: int
    file: StoredFile
    window: StoredWindow
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a search has found, in the order of the files. `num_windows`, `num_tokens`: of all."""

    candidates: tuple[Candidate, ...]
    num_windows: int
    num_tokens: int


def search(
    libraries: Sequence[Library],
    queries: QueriesRead | None,
    key_head_of: Sequence[int],
    question: str,
    num_candidates: int = CANDIDATES,
    *,
    by_words: bool = True,
) -> Found:
    """The best windows for a question; short ones count for a part.

    `queries` None: by words alone. The order by attention and the order by words are fused as those
    of passages are.
    """
    indexes = [library.index() for library in libraries]
    sizes = [len(index.ids) for index in indexes]
    attention = np.zeros(sum(sizes))
    if queries is not None:
        parts = [(index.records, index.starts, index.counts) for index in indexes]
        attention = np.concatenate(attention_to_windows(queries, key_head_of, parts)).astype(float)
    words = np.concatenate(
        [
            _words(library, index, question) if by_words else np.zeros(size)
            for library, index, size in zip(libraries, indexes, sizes, strict=True)
        ]
    )
    order = _order(attention, words, has_attention=queries is not None)
    of_library = np.repeat(np.arange(len(libraries)), sizes)
    ids = np.concatenate([index.ids for index in indexes])
    tokens = np.concatenate([index.counts for index in indexes])
    size = max((library.identity.window for library in libraries), default=1)
    costs = np.maximum(tokens[order] / size, _SMALL)
    order = order[costs.cumsum() <= max(num_candidates, float(costs[:1].sum()))]
    found: list[Candidate] = []
    for number, library in enumerate(libraries):
        chosen = ids[order[of_library[order] == number]].tolist()
        found += [
            Candidate(library=number, file=file, window=window, number=window_id)
            for window_id, (file, window) in library.windows(chosen).items()
        ]
    found.sort(key=lambda each: (each.library, each.file.path, each.window.start))
    return Found(candidates=tuple(found), num_windows=sum(sizes), num_tokens=int(tokens.sum()))


def _words(library: Library, index: Index, question: str) -> Floats:
    scores = np.zeros(len(index.ids))
    found = library.by_words(question, index.num_passages)
    if found:
        order = np.argsort(index.ids)
        ids = np.array(list(found))
        at = order[np.searchsorted(index.ids, ids, sorter=order).clip(max=len(order) - 1)]
        is_there = index.ids[at] == ids  # a file may have changed meanwhile
        scores[at[is_there]] = np.array(list(found.values()))[is_there]
    return scores


def _order(attention: Floats, words: Floats, *, has_attention: bool) -> npt.NDArray[np.int64]:
    """Indexes of windows, the best first."""
    if not has_attention:
        order = np.argsort(-words, kind="stable")
        return order[words[order] > 0]
    best = fused(attention, words)
    return np.lexsort((-attention, -best))
