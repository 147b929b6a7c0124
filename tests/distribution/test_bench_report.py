"""The page of `make bench`: what was measured, and what failed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks import report
from benchmarks.shared import results

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
