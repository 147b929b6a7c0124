"""Where an answer comes from, in the forms of OpenAI's and Anthropic's replies.

Nothing says which words of an answer rest on which passage, so each citation is for all of it: for
what was kept of libraries and documents, which is all that the model has read of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal
from urllib.parse import quote

from typing_extensions import TypedDict

from gemserve.api.replies.reply_types import NonNegative, UrlCitation
from gemserve.contract.reports import SourceReport

_TOKENS_BEFORE = 8  # of a part that is decoded: one character may have several


class FileCitation(TypedDict):
    """Of /v1/responses. `file_id`: the names of the library and of its file. `index`: the end."""

    type: Literal["file_citation"]
    file_id: str
    filename: str
    index: NonNegative


class CharLocation(TypedDict):
    """A part of a document: its characters from `start_char_index` to before `end_char_index`."""

    type: Literal["char_location"]
    cited_text: str
    document_index: NonNegative
    document_title: str | None
    file_id: str | None
    start_char_index: NonNegative
    end_char_index: NonNegative


class SearchResultLocation(TypedDict):
    """A passage of a library's file. The files are the search results, their passages the blocks.

    `source`: the names of the library and of its file.
    """

    type: Literal["search_result_location"]
    cited_text: str
    source: str
    title: str | None
    search_result_index: NonNegative
    start_block_index: NonNegative
    end_block_index: NonNegative


Citation = CharLocation | SearchResultLocation


@dataclass(frozen=True, slots=True, kw_only=True)
class CitedDocument:
    """A document of a request whose parts are to be cited. `index`: among all of its documents."""

    index: int
    text: str
    title: str | None = None
    file_id: str | None = None


def file_citations(sources: Sequence[SourceReport], text: str) -> list[FileCitation]:
    """One for each file, in the order of the sources. `text`: the answer."""
    files = dict.fromkeys((source.library, source.file) for source in sources)
    return [
        {
            "type": "file_citation",
            "file_id": f"{library}/{file}",
            "filename": file,
            "index": len(text),
        }
        for library, file in files
    ]


def url_citations(sources: Sequence[SourceReport], num_chars: int) -> list[UrlCitation]:
    """One for each place in a file, in the order of the sources. `num_chars`: of the answer."""
    places = dict.fromkeys((url_of(source), source.file) for source in sources)
    return [
        {
            "type": "url_citation",
            "url_citation": {
                "url": url,
                "title": file,
                "start_index": 0,
                "end_index": num_chars,
            },
        }
        for url, file in places
    ]


def url_of(source: SourceReport) -> str:
    """Where the server describes the file, with its lines (RFC 5147) or its page (RFC 8118)."""
    url = f"/v1/libraries/{quote(source.library)}/files/{quote(source.file)}"
    if source.lines is not None:
        return f"{url}#line={source.lines[0] - 1},{source.lines[1]}"
    return url if source.pages is None else f"{url}#page={source.pages[0]}"


def search_results(sources: Sequence[SourceReport]) -> list[SearchResultLocation]:
    """One for each kept passage."""
    numbers: dict[tuple[str, str], int] = {}
    num_blocks: dict[int, int] = {}
    found: list[SearchResultLocation] = []
    for source in sources:
        number = numbers.setdefault((source.library, source.file), len(numbers))
        block = num_blocks.get(number, 0)
        num_blocks[number] = block + 1
        found.append(
            {
                "type": "search_result_location",
                "cited_text": source.text,
                "source": f"{source.library}/{source.file}",
                "title": source.heading,
                "search_result_index": number,
                "start_block_index": block,
                "end_block_index": block + 1,
            }
        )
    return found


def char_locations(
    documents: Sequence[CitedDocument],
    ids: Sequence[int],
    kept: Sequence[tuple[int, int]],
    decode: Callable[[Sequence[int]], str],
) -> list[CharLocation]:
    """One for each kept passage of the documents. This takes as long as decoding the prompt.

    `documents`: in the order of the prompt with the tokens `ids`. `kept`: half-open ranges of its
    tokens, ascending. A document that the tokenizer does not give back as it was has none.
    """
    text, places = _places(ids, kept, decode)
    found: list[CharLocation] = []
    start = 0
    for document in documents:
        body = document.text.strip()
        at = text.find(body, start)
        if not body or at < 0:
            continue
        start = at + len(body)
        shift = at - document.text.index(body)
        for low, high in places:
            low, high = _trimmed(text, max(low, at), min(high, start))
            if low < high:
                found.append(
                    {
                        "type": "char_location",
                        "cited_text": text[low:high],
                        "document_index": document.index,
                        "document_title": document.title,
                        "file_id": document.file_id,
                        "start_char_index": low - shift,
                        "end_char_index": high - shift,
                    }
                )
    return found


def _places(
    ids: Sequence[int], kept: Sequence[tuple[int, int]], decode: Callable[[Sequence[int]], str]
) -> tuple[str, list[tuple[int, int]]]:
    """The prompt's text, and the characters of ranges of its tokens; none if they do not add up."""
    edges = sorted({0, len(ids), *(edge for each in kept for edge in each)})
    text = decode(ids)
    at = {0: 0}
    for low, high in pairwise(edges):
        # characters of several tokens, and blanks that only decode behind others
        first = max(0, low - _TOKENS_BEFORE)
        at[high] = at[low] + len(decode(ids[first:high])) - len(decode(ids[first:low]))
    if at[len(ids)] != len(text):
        return text, []
    return text, [(at[low], at[high]) for low, high in kept]


def _trimmed(text: str, low: int, high: int) -> tuple[int, int]:
    """A range of characters without the blanks at its ends."""
    part = text[low:high]
    low += len(part) - len(part.lstrip())
    return low, low + len(part.strip())


def citations_of(
    sources: Sequence[SourceReport] | None, locations: Sequence[CharLocation]
) -> Iterator[Citation]:
    """All citations of a message in Anthropic's form."""
    yield from locations
    yield from search_results(sources or ())
