"""What a search has found as the text of a document, and where each part of it comes from."""

from __future__ import annotations

from collections.abc import Sequence

from gemserve.contract.prompt_parts import Excerpt
from gemserve.prompting.answerable import BETWEEN
from gemserve.prompting.excerpt_tokens import Excerpts
from gemserve_library.search import Candidate


def join(candidates: Sequence[Candidate], names: Sequence[str]) -> Excerpts:
    """One text of all windows. `names`: of the libraries, by number."""
    texts: list[str] = []
    places: list[tuple[int, int]] = []
    parts: list[Excerpt] = []
    at, before = 0, None
    for each in candidates:
        if before is not None and not _follows(before, each):
            texts.append(BETWEEN)
            at += len(BETWEEN)
        text = each.window.text
        texts.append(text)
        places.append((at, at + len(text)))
        parts.append(
            Excerpt(
                library=names[each.library],
                file=each.file.path,
                file_id=each.file.id,
                kind=each.file.kind,
                heading=each.window.heading,
                first_line=each.window.line,
                first_character=each.window.start,
                pages=each.file.pages,
                text=text,
                rank=each.rank,
            )
        )
        at, before = at + len(text), each
    return Excerpts(text="".join(texts), places=tuple(places), parts=tuple(parts))


def _follows(before: Candidate, after: Candidate) -> bool:
    """Is a window the next one of the same file?"""
    is_same = before.library == after.library and before.file.path == after.file.path
    return is_same and before.window.start + len(before.window.text) == after.window.start
