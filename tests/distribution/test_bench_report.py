"""The page of `make bench`: what was measured, and what failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import cache, report
from benchmarks.shared import results
from gemserve_client.load_test import pictures

ROWS = [
    {"method": method, "prompt_tokens": tokens, "ttft_s": tokens / 1000, "note": None}
    for tokens in (1024, 4096)
    for method in ("none", "sieve")
]


def part_of(title: str, program: str) -> Any:
    return report.Part(
        title,
        "Less <is> better.",
        ["-c", program],
        report.Bars("ttft_s", "prompt_tokens", "method"),
    )


def test_a_page_has_pictures_tables_and_errors(tmp_path: Path) -> None:
    """A benchmark that failed ended the whole report."""
    line = json.dumps({"device": "cpu", "commit": "c0ffee", "versions": {}, "rows": ROWS})
    parts = [
        part_of("Broken", "raise SystemExit('no <such> device')"),
        part_of("Time", f"print('talk'); print({line!r})"),
        part_of("Silent", "print('no result')"),
    ]
    assert report.write(tmp_path, parts) == 2
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "no &lt;such&gt; device" in page
    assert "its last line is no JSON" in page
    assert page.count("data:image/png;base64,") == 2  # for light and dark pages
    assert "<td>sieve</td>" in page
    assert "c0ffee" in page
    assert "http" not in page
    assert json.loads((tmp_path / "results.json").read_text("utf-8"))["Time"]["rows"] == ROWS
    assert (tmp_path / "time.png").stat().st_size > 1000


def test_rows_without_figures_are_only_in_the_table(tmp_path: Path) -> None:
    rows = [{"method": "none", "prompt_tokens": 1024, "reason": "skipped: out of time"}]
    line = json.dumps({"device": "cpu", "commit": None, "versions": {}, "rows": rows})
    assert report.write(tmp_path, [part_of("Time", f"print({line!r})")]) == 0
    assert "skipped: out of time" in (tmp_path / "report.html").read_text("utf-8")


def test_every_part_s_script_takes_its_options() -> None:
    """A renamed option would be noticed only by whoever runs `make bench`."""
    common = Path(results.__file__).read_text("utf-8")
    for part in report.PARTS:
        if part.command[0] == "-m":
            continue
        source = Path(part.command[0]).read_text("utf-8") + common
        for option in part.command[1:]:
            if option.startswith("--"):
                assert f'"{option}"' in source, (part.title, option)


def rows_of_cache() -> list[dict[str, Any]]:
    times = {"ttft_s": 2.0, "cold_ttft_s": 3.0, "same_answer": True}
    asked = [{"question": number, "prompt_tokens": 8192, **times} for number in (1, 2)]
    memory = {"summary": "memory", "cache_bytes": 1}
    return [*asked, cache._summary("questions", asked), memory, cache._summary("turns", asked)]


MADE = {
    "Time to first token": ROWS,
    "Decoding": [{"engine": "gemserve", "sequences": 8, "tokens_per_s": 9.5}],
    "Throughput": [{"method": "sieve", "prompt_tokens": 4096, "requests_per_s": 0.5}],
    "Streams beside a long prompt": [
        {"method": "sieve", "prompt_tokens": 8192, "gap_p99_beside_s": 1.5}
    ],
    "Further questions about a document": rows_of_cache(),
    "Needles in prose": [{"method": "none", "prompt_tokens": 1024, "score": 1.0}],
}


@pytest.mark.parametrize("part", report.PARTS, ids=lambda part: part.title)
def test_every_part_s_rows_are_drawn(part: Any) -> None:
    """The rows of further questions have no field that the picture asked for: no page at all."""
    figure = report.drawing(part.bars, MADE[part.title])(pictures.LIGHT)
    (axes,) = figure.axes
    assert len(axes.patches) >= 1
    assert all(bar.get_height() > 0 for bar in axes.patches)


def test_a_picture_that_cannot_be_drawn_leaves_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    line = json.dumps({"device": "cpu", "commit": None, "versions": {}, "rows": ROWS})
    monkeypatch.setattr(report, "drawing", lambda *_: {}["no <such> field"])
    assert report.write(tmp_path, [part_of("Time", f"print({line!r})")]) == 0
    page = (tmp_path / "report.html").read_text("utf-8")
    assert "no picture: KeyError: &#x27;no &lt;such&gt; field&#x27;" in page
    assert "<td>sieve</td>" in page
