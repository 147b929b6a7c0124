"""What the GPU benchmark does with what goes wrong, and how it judges what was measured."""

from __future__ import annotations

import importlib
import json
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ORIGIN = {"commit": "c", "device": "d", "is_smoke": False}


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports a module of the benchmarks."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def records(load: Any) -> ModuleType:
    found: ModuleType = load("gpu_sections.record")
    return found


def rows_of(path: Path) -> list[tuple[str, str | None]]:
    return [(row["status"], row["reason"]) for row in json.loads(path.read_text())["rows"]]


def test_a_failure_is_a_row_and_the_section_goes_on(records: ModuleType, tmp_path: Path) -> None:
    path = tmp_path / "rates.json"
    recovered: list[bool] = []
    record = records.Record(
        path, limit_s=60.0, origin=ORIGIN, recover=lambda: recovered.append(True)
    )

    def fail() -> Any:
        raise RuntimeError("out of memory")

    assert not record.attempt({"kernel": "a"}, fail)
    assert recovered == [True]
    assert record.attempt({"kernel": "b"}, lambda: {"time": (1.5, "s")})
    assert not record.attempt({"kernel": "c"}, lambda: {}, expected_s=61.0)
    # nothing has been finished: all of it is on the disk already
    assert rows_of(path) == [
        ("failed", "RuntimeError: out of memory"),
        ("measured", None),
        ("skipped", "skipped: out of time"),
    ]


def test_time_that_runs_out_within_a_measurement(records: ModuleType, tmp_path: Path) -> None:
    record = records.Record(tmp_path / "decode.json", limit_s=0.01, origin=ORIGIN)

    def wait() -> Any:
        while True:
            time.sleep(0.005)
            record.check_time()

    assert not record.attempt({"sequences": 1}, wait)
    assert rows_of(tmp_path / "decode.json") == [("skipped", "skipped: out of time")]


def test_what_is_not_finite_can_be_written_and_read(records: ModuleType) -> None:
    assert records.figure(float("nan"), "s") == {"value": None, "unit": "s", "not_finite": "nan"}


def test_a_worker_that_dies_takes_one_section_with_it(
    load: Any, records: ModuleType, tmp_path: Path
) -> None:
    gpu = load("gpu")
    done = records.Record(tmp_path / "kernels.json", limit_s=60.0, origin=ORIGIN)
    done.finish("done")
    died = records.Record(tmp_path / "rates.json", limit_s=60.0, origin=ORIGIN)
    died.add({"kernel": "pooled"}, {"time": (1.5, "s")})
    later = time.time() + 600
    left = gpu.close(tmp_path, ["kernels", "rates", "ttft"], "its process ended", later)
    assert left == ["ttft"]
    report = gpu.merge(tmp_path)
    assert report["sections"]["kernels"]["status"] == "done"
    assert report["sections"]["rates"]["status"] == "failed"
    assert report["sections"]["rates"]["reason"] == "its process ended"
    assert [row["labels"] for row in report["rows"]] == [{"kernel": "pooled"}]


@pytest.mark.parametrize(("left_s", "why"), [(600, "ended"), (0, "ended")])
def test_a_worker_that_begins_nothing_is_not_tried_again(
    load: Any, tmp_path: Path, left_s: float, why: str
) -> None:
    gpu = load("gpu")
    assert gpu.close(tmp_path, ["model", "ttft"], why, time.time() + left_s) == []
    report = gpu.merge(tmp_path)
    assert {section["reason"] for section in report["sections"].values()} == {why}


def test_other_code_is_not_merged(load: Any, records: ModuleType, tmp_path: Path) -> None:
    """One folder may hold several runs' sections; a ratio of two versions means nothing."""
    gpu = load("gpu")
    old = records.Record(tmp_path / "ttft.json", limit_s=1.0, origin={**ORIGIN, "commit": "old"})
    old.finish("done")
    time.sleep(0.01)
    records.Record(tmp_path / "ceilings.json", limit_s=1.0, origin=ORIGIN).finish("done")
    report = gpu.merge(tmp_path)
    assert (report["commit"], report["left_out"]) == ("c", ["ttft"])
    assert list(report["sections"]) == ["ceilings"]


def row(section: str, labels: dict[str, Any], name: str, value: float) -> dict[str, Any]:
    figures = {name: {"value": value, "unit": "1"}}
    return {"section": section, "status": "measured", "labels": labels, "figures": figures}


def test_targets(load: Any) -> None:
    sieve = {"variant": "default", "method": "sieve", "prompt_tokens": 131072}
    found = load("gpu_sections.targets").judge(
        [
            row("ttft", sieve | {"prompt_tokens": 8192}, "ttft_to_none", 0.9),
            row("ttft", sieve | {"method": "none"}, "ttft_to_none", 1.0),
            row("ttft", sieve, "ttft_to_none", 0.42),
            row("ttft", sieve | {"variant": "fp8 filter"}, "ttft_to_none", 0.38),
            row("ttft", sieve, "decode_kv_to_none", 0.0111),
            row("attention", {"where": "alone", "prompt_tokens": 131072}, "share_of_bf16", 0.7),
            row("rates", {"kernel": "largest_attention", "keys": 131072}, "share_of_copy", 0.71),
            row("decode", {"sequences": 1, "cuda_graphs": "off"}, "share_of_copy", 0.9),
            row("decode", {"sequences": 1, "cuda_graphs": "on"}, "share_of_copy", 0.5),
        ]
    )
    verdicts = [target["verdict"] for target in found]
    assert verdicts == ["met", "met", "missed", "not measured", "met", "missed"]


def test_errors_of_kernels(load: Any) -> None:
    kernels = load("gpu_sections.kernels")
    theirs = torch.tensor([[2.0, -torch.inf, torch.nan], [0.0, 0.5, 100.0]])
    assert kernels.largest_error(theirs, theirs) == 0
    ours = theirs + torch.tensor([[0.5, 0.0, 0.0], [1.0, 0.0, 0.0]])
    # of a row, what is large beside its largest value
    assert kernels.largest_error(ours, theirs) == pytest.approx(0.25)
    assert kernels.largest_error(ours.half(), theirs) == torch.inf
    with kernels.poisoned():
        unwritten = torch.empty(2, 3)
    assert kernels.largest_error(unwritten, torch.zeros(2, 3)) == torch.inf
