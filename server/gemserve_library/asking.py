"""Puts what libraries have of a question in front of it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from gemserve.contract.events import Finished
from gemserve.contract.filter_options import CANDIDATES
from gemserve.contract.prompt_parts import Excerpt
from gemserve.contract.reports import SearchReport
from gemserve.contract.requests import Request
from gemserve.prompting.answerable import BETWEEN, Answerable
from gemserve.prompting.encoding import decode
from gemserve.prompting.excerpt_tokens import Excerpts
from gemserve_library.library import Library
from gemserve_library.search import Candidate, search
from gemserve_library.vectors import VectorRequests, queries_of


def join(candidates: Sequence[Candidate], names: Sequence[str]) -> Excerpts:
    """One text of all segments. `names`: of the libraries, by number."""
    texts: list[str] = []
    places: list[tuple[int, int]] = []
    parts: list[Excerpt] = []
    at, before = 0, None
    for each in candidates:
        if before is not None and not _follows(before, each):
            texts.append(BETWEEN)
            at += len(BETWEEN)
        text = each.segment.text
        texts.append(text)
        places.append((at, at + len(text)))
        parts.append(
            Excerpt(
                library=names[each.library],
                file=each.file.path,
                file_id=each.file.id,
                kind=each.file.kind,
                heading=each.segment.heading,
                first_line=each.segment.line,
                first_character=each.segment.start,
                pages=each.file.pages,
                text=text,
                rank=each.rank,
            )
        )
        at, before = at + len(text), each
    return Excerpts(text="".join(texts), places=tuple(places), parts=tuple(parts))


def _follows(before: Candidate, after: Candidate) -> bool:
    """Is a segment the next one of the same file?"""
    is_same = before.library == after.library and before.file.path == after.file.path
    return is_same and before.segment.start + len(before.segment.text) == after.segment.start


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
        windows=found.num_segments,
        tokens=found.num_tokens,
        candidates=len(excerpts.parts),
        read=len(excerpts.parts),
        ms=(time.monotonic() - started_s) * 1e3,
    )
    segment_size = requests.identity.window
    return Answerable(excerpts=excerpts, searched=searched, segment_size=segment_size)


def question_text(request: Request, tokenizer: Any) -> str:
    """The words of a request's question; of one without a question, those at its end."""
    ids = request.prompt_ids
    ranges = request.question or ((max(0, len(ids) - 64), len(ids)),)
    return " ".join(decode(tokenizer, ids[low:high]) for low, high in ranges)
