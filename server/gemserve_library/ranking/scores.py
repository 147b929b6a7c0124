"""How relevant documents are to a query: by what its rows look at in each, and by its words.

Each document is judged under a softmax of its own, so its attention does not depend on the others.
In-context reranking by attention: Chen et al., "Attention in Large Language Models Yields Efficient
Zero-Shot Re-Rankers", 2024; by few heads: QRHead (Zhang et al., 2025). Both read all documents in
one prompt. `docs/log/libraries.md` compares the rules.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gemserve.contract.filter_plan import Segment, SummaryArrays
from gemserve.contract.prompt_parts import TokenArray

BEST_TOKENS = 8  # whose scores are a document's; a fact and its subject have about as many
_SATURATION, _BY_LENGTH = 1.2, 0.75  # k1 and b of BM25, as Lucene has them

Floats = npt.NDArray[np.float64]
Documents = Sequence[tuple[int, int]]  # half-open ranges of tokens, ascending; they may be empty


def attention_scores(
    segments: Sequence[Segment], summaries: Sequence[SummaryArrays], documents: Documents
) -> Floats:
    """The mean of the `BEST_TOKENS` highest token scores of each document: [documents], 0 to 1.

    A token's score is the largest share of a row's attention to its segment and the anchor that it
    gets in any head. Of a document in several `segments` the best one counts. Missing tokens count
    as 0.
    """
    scores = np.zeros(len(documents))
    stops = np.array([stop for _, stop in documents])
    for segment, summary in zip(segments, summaries, strict=True):
        at = int(np.searchsorted(stops, segment.stop))
        scores[at] = max(scores[at], _segment_score(summary, segment.num_tokens))
    return scores


def word_shares(words: Sequence[TokenArray], documents: Documents) -> Floats:
    """How much of the query's words each document has: [documents], 0 to 1.

    `words`: for each word the tokens of the documents that it begins in. BM25 with Lucene's
    settings and logarithm, as a share of the weight of all words: those that few documents have
    weigh most. It does not exceed 1 where words are frequent.
    """
    scores = np.zeros(len(documents))
    starts, stops = np.array(documents).T
    lengths = stops - starts
    if not len(words) or not lengths.any():
        return scores
    most = _SATURATION * (1 - _BY_LENGTH + _BY_LENGTH * lengths / lengths[lengths > 0].mean())
    total = 0.0
    for at in words:
        counts = at.searchsorted(stops) - at.searchsorted(starts)
        having = int((counts > 0).sum())
        weight = np.log1p((len(documents) - having + 0.5) / (having + 0.5))
        scores += weight * counts * (_SATURATION + 1) / (counts + most)
        total += weight
    return np.minimum(1.0, scores / total)


def relevance(attention: Floats, words: Floats) -> Floats:
    """Both judges count alike: [documents], 0 to 1."""
    return (attention + words) / 2


def _segment_score(summary: SummaryArrays, num_tokens: int) -> float:
    total = np.logaddexp(summary.keys.astype(np.float64), summary.sinks)[:, None]
    scores = np.zeros(num_tokens)
    np.maximum.at(scores, summary.places.ravel(), np.exp(summary.best - total).ravel())
    return float(min(1.0, np.sort(scores)[-BEST_TOKENS:].sum() / BEST_TOKENS))
