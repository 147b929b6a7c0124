"""A dry run of the GPU benchmark: every section, on the CPU, with tiny shapes."""

from __future__ import annotations

import importlib
import inspect
import json
import pkgutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import gemserve_kernels

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "gpu.py"
FORKED = Path(__file__).with_name("forked_sections.py")
PICTURES = ("ttft", "memory", "decode", "kernels")
SECTIONS = (
    *("environment", "ceilings", "kernels", "rates", "model"),
    *("chunks", "attention", "ttft", "windows", "million", "large"),
    *("streams", "decode", "throughput"),
)


def test_unknown_section_is_refused(tmp_path: Path) -> None:
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--sections", "ttft,speed"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "--sections 'speed': must be among environment, ceilings" in done.stderr


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
@pytest.mark.slow
def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    """And it does not start a process for every section that cannot begin either."""
    command = [sys.executable, str(SCRIPT), "--out", str(tmp_path), "--sections", "kernels"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 1
    assert "nothing was measured" in done.stderr
    report = json.loads(done.stdout.splitlines()[-1])
    assert list(report["sections"]) == ["environment", "ceilings", "kernels"]
    for section in report["sections"].values():
        assert section["status"] == "skipped"
        assert "cuda" in section["reason"].lower()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_dry_run_is_complete(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    command = [sys.executable, str(FORKED), "--smoke", "--out", str(tmp_path), "--minutes", "14"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=890, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report == json.loads((tmp_path / "gpu.json").read_text())

    assert (report["benchmark"], report["schema"], report["is_smoke"]) == ("gpu", 1, True)
    assert tuple(report["sections"]) == SECTIONS
    for name, section in report["sections"].items():
        assert section["status"] == "done", (name, section["reason"])
    others = [row for row in report["rows"] if row["status"] != "measured"]
    assert all(row["reason"].startswith("skipped: not available: ") for row in others), others
    rows = [row for row in report["rows"] if row["status"] == "measured"]
    for row in rows:
        for figure in row["figures"].values():
            assert figure["unit"]
            assert "not_finite" not in figure, row
    _check_kernels(rows)
    _check_model(rows)
    # no figure of a dry run is one that was aimed at
    assert {target["verdict"] for target in report["targets"]} == {"not measured"}
    assert report["pictures"] == {f"{name}.png": "drawn" for name in PICTURES}
    for name in PICTURES:
        assert (tmp_path / f"{name}.png").stat().st_size > 0


def _labels(rows: list[dict[str, Any]], section: str, *names: str) -> set[tuple[Any, ...]]:
    of_section = [row["labels"] for row in rows if row["section"] == section]
    return {tuple(labels.get(name) for name in names) for labels in of_section}


def _check_kernels(rows: list[dict[str, Any]]) -> None:
    """No Triton kernel is forgotten."""
    known: set[tuple[str]] = set()
    for module in pkgutil.iter_modules(gemserve_kernels.__path__, "gemserve_kernels."):
        if "triton_" in module.name and not module.name.endswith("triton_blocks"):
            members = vars(importlib.import_module(module.name))
            known |= {
                (name,)
                for name, member in members.items()
                if inspect.isfunction(member)
                and member.__module__ == module.name
                and not name.startswith("_")
            }
    assert _labels(rows, "rates", "kernel") == known
    # the other files of tests/kernels run in this suite anyway
    (checked,) = (row for row in rows if row["section"] == "kernels")
    assert checked["labels"] == {"file": "test_triton_pooling.py"}
    assert checked["figures"]["passed"]["value"] > 0
    assert checked["figures"]["failed"]["value"] == 0


def _check_model(rows: list[dict[str, Any]]) -> None:
    methods = ("none", "sieve", "gemfilter", "snapkv", "transformers_sdpa")
    expected = {(method, length) for method in methods for length in (96, 192)}
    assert _labels(rows, "ttft", "method", "prompt_tokens") == expected
    for row in rows:
        if row["section"] == "ttft":
            assert row["figures"]["ttft_to_none"]["value"] > 0
        if row["section"] == "ttft" and row["labels"]["method"] == "sieve":
            names = {"generation", "peak_memory", "peak_kv", "decode_kv_to_none", "layers_to_none"}
            assert names <= row["figures"].keys()
            # at most 32 kept, and 4 generated, of 4 layers, against all tokens; without breaks a
            # passage has at most 17 tokens, so that less room than that stays empty
            share = row["figures"]["decode_kv_to_none"]["value"]
            kept = share * (row["labels"]["prompt_tokens"] + 4) - 4
            assert kept == pytest.approx(round(kept))
            assert 32 - 17 < round(kept) <= 32
    ways = {("none",), ("windows",), ("reader",)}
    assert _labels(rows, "windows", "method") == _labels(rows, "large", "method") == ways
    assert _labels(rows, "million", "method") == ways - {("none",)}
    assert _labels(rows, "streams", "streams", "window") == {(2, 64)}
    assert _labels(rows, "decode", "sequences") == {(1,), (3,)}
    assert _labels(rows, "throughput", "method") == {("none",), ("sieve",)}
    assert _labels(rows, "attention", "where", "prompt_tokens") == {
        (where, length) for where in ("alone", "filter pass") for length in (64, 192)
    }
    fastest = [r for r in rows if r["section"] == "chunks" and r["figures"]["is_fastest"]["value"]]
    assert len(fastest) == 1
