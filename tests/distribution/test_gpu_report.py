"""What the GPU benchmark does with what goes wrong, and how it judges what was measured."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import gpu
from benchmarks.gpu_sections import gpu_report as report
from benchmarks.shared.results import Rows

ORIGIN = {"commit": "c", "device": "d", "is_smoke": False}


def rows_to(path: Path | None, seconds: float = 60.0) -> Rows:
    options = argparse.Namespace(rows=path, device="cpu", seconds=seconds)
    return Rows(options)


def fail() -> Any:
    raise RuntimeError("out of memory")


def test_a_failure_is_a_row_and_the_section_goes_on(tmp_path: Path) -> None:
    path = tmp_path / "rates.jsonl"
    rows = rows_to(path)
    assert not rows.attempt({"kernel": "a"}, fail)
    assert rows.attempt({"kernel": "b"}, lambda: {"time_s": 1.5})
    assert rows.attempt({"kernel": "b"}, lambda: {"time_s": 2.5})
    # nothing has been finished: all of it is on the disk already, and a later row counts
    with path.open("a") as file:
        file.write('{"labels": {"kernel": "cut')
    found = report.read_rows(path)
    assert [(row["status"], row["reason"]) for row in found] == [
        ("failed", "RuntimeError: out of memory"),
        ("measured", None),
    ]
    assert found[1]["figures"] == {"time": {"value": 2.5, "unit": "s"}}


def test_an_ordinary_run_ends_at_a_failure() -> None:
    with pytest.raises(RuntimeError, match="out of memory"):
        rows_to(None).attempt({"kernel": "a"}, fail)


def test_nothing_begins_after_the_section_s_time(tmp_path: Path) -> None:
    path = tmp_path / "decode.jsonl"
    assert not rows_to(path, seconds=0.0).attempt({"sequences": 1}, fail)
    (row,) = report.read_rows(path)
    assert (row["status"], row["reason"]) == ("skipped", "skipped: out of time")


def test_what_is_not_finite_can_be_written_and_read() -> None:
    assert report.figure(float("nan"), "s") == {"value": None, "unit": "s", "not_finite": "nan"}


def test_a_process_that_dies_or_hangs_gives_its_reason(tmp_path: Path) -> None:
    folder = tmp_path / "sections"
    dies = [sys.executable, "-c", "print('no more memory'); raise SystemExit(3)"]
    reason = gpu.run(dies, folder, 60.0)
    assert reason == "its process ended with status 3; the end of its output: no more memory"
    hangs = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert gpu.run(hangs, folder, 0.2).startswith("killed: took more than 0 s")
    assert gpu.run([sys.executable, "-c", ""], folder, 60.0) is None


def section(folder: Path, name: str, **fields: Any) -> None:
    started = {"value": fields.pop("started_s", 1.0), "unit": "s"}
    content = {"status": "done", "reason": None, "origin": ORIGIN, "started_unix": started}
    (folder / f"{name}.json").write_text(json.dumps(content | fields))


def test_a_run_that_was_stopped_keeps_what_it_had(tmp_path: Path) -> None:
    section(tmp_path, "ceilings")
    section(tmp_path, "rates", status="running")
    rows_to(tmp_path / "rates.jsonl").put({"kernel": "pooled"}, {"time_s": 1.5})
    found = report.merge(gpu.read_sections(tmp_path), tmp_path)
    assert found["sections"]["ceilings"]["status"] == "done"
    rates = found["sections"]["rates"]
    assert (rates["status"], rates["reason"]) == ("failed", "gpu.py was stopped")
    assert [row["labels"] for row in found["rows"]] == [{"kernel": "pooled"}]


def test_other_code_is_not_merged(tmp_path: Path) -> None:
    """One folder may hold several runs' sections; a ratio of two versions means nothing."""
    section(tmp_path, "ttft", origin={**ORIGIN, "commit": "old"})
    section(tmp_path, "ceilings", started_s=2.0)
    found = report.merge(gpu.read_sections(tmp_path), tmp_path)
    assert (found["commit"], found["left_out"]) == ("c", ["ttft"])
    assert list(found["sections"]) == ["ceilings"]


def row(section: str, labels: dict[str, Any], name: str, value: float) -> dict[str, Any]:
    figures = {name: {"value": value, "unit": "1"}}
    return {"section": section, "status": "measured", "labels": labels, "figures": figures}


def test_shares_and_ratios() -> None:
    none = {"variant": "default", "method": "none", "prompt_tokens": 8}
    rows = [
        row("ceilings", {"ceiling": "copy"}, "bandwidth", 100.0),
        row("rates", {"kernel": "pooled"}, "bandwidth", 70.0),
        row("decode", {"sequences": 1}, "step", 2.0),
        row("ttft", none, "decode_kv", 50.0),
        row("ttft", none | {"method": "sieve"}, "decode_kv", 5.0),
        row("attention", {"where": "alone", "backend": "b", "prompt_tokens": 8}, "rate", 4.0),
        row("attention", {"where": "filter pass", "backend": "b", "prompt_tokens": 8}, "rate", 3.0),
    ]
    rows[2]["figures"]["read"] = {"value": 30.0, "unit": "bytes"}
    report.add_shares(rows)
    found = [{name: of["value"] for name, of in row["figures"].items()} for row in rows]
    assert found[1]["share_of_copy"] == 0.7
    assert found[2]["share_of_copy"] == 0.15
    assert found[4]["decode_kv_to_none"] == 0.1
    assert found[6]["share_of_alone"] == 0.75
    assert found[6]["share_of_bf16"] is None  # that ceiling was not measured


def test_the_fastest_chunk_size() -> None:
    times = {(64, "none"): 5.0, (64, "sieve"): 1.0, (128, "none"): 3.0, (128, "sieve"): 2.0}
    rows = [
        row("chunks", {"max_chunk_tokens": size, "method": method}, "ttft", time_s)
        for (size, method), time_s in times.items()
    ]
    found = report.chunk_rows(rows)
    sizes = [(of["labels"], of["figures"]["is_fastest"]["value"]) for of in found]
    assert sizes == [({"max_chunk_tokens": 64}, 0), ({"max_chunk_tokens": 128}, 1)]


def test_targets() -> None:
    sieve = {"variant": "default", "method": "sieve", "prompt_tokens": 131072}
    found = report.judge(
        [
            row("ttft", sieve | {"prompt_tokens": 8192}, "ttft_to_none", 0.9),
            row("ttft", sieve | {"method": "none"}, "ttft_to_none", 1.0),
            row("ttft", sieve, "ttft_to_none", 0.42),
            row("ttft", sieve | {"variant": "fp8 filter"}, "ttft_to_none", 0.38),
            row("windows", sieve | {"method": "windows"}, "ttft_to_none", 0.2),
            row("windows", sieve | {"method": "windows"}, "share_of_bf16", 0.59),
            row("ttft", sieve, "decode_kv_to_none", 0.0111),
            row("attention", {"where": "alone", "prompt_tokens": 131072}, "share_of_bf16", 0.7),
            row("rates", {"kernel": "largest_attention", "keys": 131072}, "share_of_copy", 0.71),
            row("decode", {"sequences": 1, "cuda_graphs": "off"}, "share_of_copy", 0.9),
            row("decode", {"sequences": 1, "cuda_graphs": "on"}, "share_of_copy", 0.5),
        ]
    )
    verdicts = [target["verdict"] for target in found]
    of_windows = ["met", "not measured", "missed"]  # of an 8B, of a 32B, and products
    assert verdicts == ["met", "met", *of_windows, "missed", "not measured", "met", "missed"]
