"""Puts what libraries have of a question in front of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from gemserve.contract.events import Finished
from gemserve.contract.filter_options import CANDIDATES
from gemserve.contract.reports import SearchReport
from gemserve.contract.requests import Request
from gemserve.prompting.answerable import Answerable
from gemserve.prompting.encoding import decode
from gemserve_library.excerpts import join
from gemserve_library.library import Library
from gemserve_library.search import search
from gemserve_library.vectors import VectorRequests, queries_of


def find_excerpts(
    libraries: Sequence[Library],
    names: Sequence[str],
    request: Request,
    finished: Finished,
    requests: VectorRequests,
    tokenizer: Any,
    candidates: int = CANDIDATES,
) -> Answerable:
    """What libraries have of the question of a request. `finished`: its question alone was read.

    `names`: of the libraries, for the report. Raises `LibraryError`.
    """
    started_s = time.monotonic()
    found = search(
        libraries,
        queries_of(finished),
        requests.key_head_of,
        question_text(request, tokenizer),
        candidates,
    )
    excerpts = join(found.candidates, names)
    searched = SearchReport(
        libraries=tuple(names),
        windows=found.num_windows,
        tokens=found.num_tokens,
        candidates=len(excerpts.parts),
        read=len(excerpts.parts),
        ms=(time.monotonic() - started_s) * 1e3,
    )
    window = requests.identity.window
    return Answerable(excerpts=excerpts, searched=searched, window=window)


def question_text(request: Request, tokenizer: Any) -> str:
    """The words of a request's question; of one without a question, those at its end."""
    ids = request.prompt_ids
    ranges = request.question or ((max(0, len(ids) - 64), len(ids)),)
    return " ".join(decode(tokenizer, ids[low:high]) for low, high in ranges)
