"""Where what was kept comes from, the best first."""

from dataclasses import replace

import numpy as np
import pytest

from gemserve.cli import ask
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.prompt_parts import Excerpt
from gemserve.contract.reports import FilterReport, SearchReport, SourceReport
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.filtering.source_report import report_sources

WORDS = ("one ", "two ", "three ", "four ", "five ", "six ", "seven ", "eight ")


def excerpt(file: str, start: int, rank: int) -> Excerpt:
    """A segment of eight words, each a token."""
    return Excerpt(
        library="notes",
        file=file,
        file_id=file,
        kind="text",
        heading="",
        first_line=1,
        first_character=0,
        pages=(),
        text="".join(WORDS),
        rank=rank,
        start=start,
        stop=start + len(WORDS),
        characters=np.cumsum([0, *(len(word) for word in WORDS[:-1])]),
    )


def request() -> Request:
    return Request(
        request_id="a",
        prompt_ids=range(20),
        sampling=SamplingParams(max_tokens=1),
        filter=FilterParams(method="sieve", keep="auto"),
        excerpts=(excerpt("a", 2, rank=1), excerpt("b", 10, rank=0)),
    )


def test_sources_follow_the_order_of_the_passages_that_were_chosen() -> None:
    """They came in the order of the files, with the passage that answers somewhere among them."""
    kept = [0, 1, 2, 3, 6, 7, 12, 13, 18, 19]
    found = report_sources(request(), kept, best=[(12, 14), (6, 8)])
    assert found is not None
    texts = [(source.file, source.text) for source in found]
    assert texts == [("b", "three four"), ("a", "five six"), ("a", "one two")]


def test_where_everything_is_kept_the_best_segment_comes_first() -> None:
    found = report_sources(request(), None)
    assert found is not None
    assert [source.file for source in found] == ["b", "a"]


def test_without_excerpts_it_tells_whether_anything_was_searched() -> None:
    """A library that was still empty had null, as if there were no library."""
    searched = SearchReport(libraries=("notes",), windows=0, tokens=0, candidates=0, read=0, ms=1.0)
    nothing = replace(request(), excerpts=(), searched=searched)
    assert report_sources(nothing, None) == ()
    assert report_sources(replace(nothing, searched=None), None) is None
    assert report_sources(replace(request(), searched=searched), ()) == ()


def test_ask_shows_five_sources(capsys: pytest.CaptureFixture[str]) -> None:
    sources = tuple(
        SourceReport(
            library="notes",
            file=f"file{number}",
            heading=None,
            lines=(1, 2),
            pages=None,
            characters=(0, 8),
            text="one two",
        )
        for number in (7, 1, 6, 2, 5, 3, 4)
    )
    report = FilterReport(
        method="sieve",
        applied=True,
        reason=None,
        layer=8,
        prompt_tokens=20,
        kept_tokens=10,
        cached_tokens=0,
        filter_ms=1.0,
        selection=None,
        sources=sources,
    )
    ask._show_sources(report)
    said = capsys.readouterr().err.splitlines()
    assert said[1:] == [
        *(f"  file{number}:1-2" for number in (7, 1, 6, 2, 5)),
        "  and 2 more",
    ]
    ask._show_sources(replace(report, sources=()))
    assert capsys.readouterr().err == "no sources: nothing was found\n"
