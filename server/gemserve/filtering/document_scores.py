"""How relevant documents are to a query, by what its rows look at in each. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gemserve.filter_plan import SummaryArrays, Window

Floats = npt.NDArray[np.float64]


def document_scores(
    windows: Sequence[Window],
    summaries: Sequence[SummaryArrays],
    documents: Sequence[tuple[int, int]],
) -> Floats:
    """The score of each document, 0 to 1: [documents].

    `windows`: of all documents, none of two. `documents`: half-open ranges of tokens; one without
    tokens has the score 0.
    """
    scores = np.zeros(len(documents))
    starts = np.array([start for start, _ in documents])
    for window, summary in zip(windows, summaries, strict=True):
        at = int(np.searchsorted(starts, window.start, side="right")) - 1
        scores[at] = max(scores[at], _best(summary))
    return scores


def _best(summary: SummaryArrays) -> float:
    total = np.logaddexp(summary.keys, summary.sinks)[:, None]
    return float(np.exp(summary.best - total).max())
