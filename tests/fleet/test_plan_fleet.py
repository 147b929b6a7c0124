"""`gemserve plan --fleet` as a command: its tables, its JSON, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gemserve.cli.main import main

SMALL = ["--tokens", "4096", "--window", "512", "--simulated-requests", "200"]
SPEEDS = [
    "--read-tokens-per-s",
    "2000",
    "--filter-tokens-per-s",
    "8000",
    "--decode-steps-per-s",
    "50",
]


def _plan(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[list[str], dict[str, Any]]:
    assert main(["plan", "--fleet", *SMALL, "--json", *flags]) == 0
    lines = capsys.readouterr().out.splitlines()
    return lines, json.loads(lines[-1])


def test_the_tables_and_the_line_of_json(capsys: pytest.CaptureFixture[str]) -> None:
    lines, result = _plan(capsys, *SPEEDS, "--requests-per-day", "100000")
    ways = [(row["reading"], row["cache"]) for row in result["rows"]]
    readings = ("whole", "one_pass", "windows")
    assert ways == [(reading, cache) for reading in readings for cache in (False, True)]
    replicas = [row["outcome"]["num_replicas"] for row in result["rows"]]
    assert replicas[0] > replicas[2] >= replicas[3]
    routers = {row["policy"]: row for row in result["routers"]}
    assert set(routers) == {"router", "consistent hash", "least loaded", "random"}
    assert routers["router"] == result["rows"][-1]["outcome"]
    assert any(line.startswith("windows") and str(replicas[-1]) in line for line in lines)
    assert _plan(capsys, *SPEEDS, "--requests-per-day", "100000") == (lines, result)


def test_the_help_names_the_defaults(capsys: pytest.CaptureFixture[str]) -> None:
    """argparse fails on a percent sign, and only when help is printed."""
    with pytest.raises(SystemExit, match="0"):
        main(["plan", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "seconds in which 95% get their first token (default: 10)" in shown
    assert "measured, by the filter pass (default: by FLOPs)" in shown


def test_a_given_number_of_replicas_is_simulated(capsys: pytest.CaptureFixture[str]) -> None:
    _, result = _plan(capsys, *SPEEDS, "--replicas", "3", "--cache-memory", "0")
    assert [row["outcome"]["num_replicas"] for row in result["rows"]] == [3, 3, 3]
    assert all(row["outcome"]["hit_rate"] == 0 for row in result["rows"])


def test_ways_that_cannot_be_served_say_why(capsys: pytest.CaptureFixture[str]) -> None:
    lines, result = _plan(capsys, *SPEEDS, "--ttft-p95", "0.1", "--replicas", "auto")
    assert all(row["outcome"] is None for row in result["rows"])
    assert result["routers"] == []
    text = "\n".join(lines)
    assert "whole: no fleet of up to 4,096 replicas is fast enough; 2.05 s alone" in text

    long = ["--tokens", "65536", "--replicas", "1"]
    _, result = _plan(capsys, *SPEEDS, *long)
    sizes = {row["reading"]: row["peak_bytes"] for row in result["rows"]}
    lines, result = _plan(capsys, *SPEEDS, *long, "--kv-memory", str(sizes["windows"]))
    assert [line.partition(":")[0] for line in lines if ": needs " in line] == ["whole", "one pass"]
    assert result["rows"][-1]["outcome"] is not None


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--requests-per-day", "0"], "requests_per_day=0: must be a number, at least 0.001"),
        (["--replicas", "0"], "replicas=0: must be a whole number, from 1 to 4096"),
        (["--replicas", "many"], "replicas=many: must be a whole number, from 1 to 4096"),
        (["--ttft-p95", "-1"], "ttft_p95=-1: must be a number, at least 0.001"),
        (["--accelerator", "h900"], "accelerator=h900: must be one of a100, h100, h200"),
        (["--efficiency", "1.5"], "efficiency=1.5: must be a number, from 0.01 to 1"),
        (["--bandwidth-efficiency", "nan"], "bandwidth_efficiency=nan: must be a number"),
        (["--cache-memory", "2"], "cache_memory=2: must be a number, from 0 to 1"),
        (["--documents", "0"], "documents=0: must be a whole number, from 1 to 1e+07"),
        (["--zipf", "9"], "zipf=9: must be a number, from 0 to 4"),
        (["--new-share", "1.1"], "new_share=1.1: must be a number, from 0 to 1"),
        (["--read-tokens-per-s", "fast"], "read_tokens_per_s=fast: must be a number"),
        (["--simulated-requests", "5"], "simulated_requests=5: must be a whole number, from 100"),
        (["--seed", "-1"], "seed=-1: must be a whole number, from 0"),
        (["--offload-layers", "auto"], "must be 0 with --fleet"),
        (["--kv-memory", "400GB"], "kv_memory=400000000000: with "),
    ],
)
def test_bad_input_names_field_value_and_limit(
    capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    assert main(["plan", "--fleet", *SMALL, *flags]) != 0
    assert said in capsys.readouterr().err


def test_options_of_a_fleet_need_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--tokens", "4096", "--replicas", "2", "--zipf", "1"]) != 0
    error = capsys.readouterr().err
    assert "replicas=2: has an effect only with --fleet" in error
    assert "zipf=1: has an effect only with --fleet" in error


def test_a_server_s_variables_do_not_stop_a_plan(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without --fleet they have no effect, and only as flags they are mistakes."""
    monkeypatch.setenv("GEMSERVE_REPLICAS", "2")
    assert main(["plan", "--cache-memory", "0.2", "--model", "builtin"]) == 2
    assert capsys.readouterr().err.startswith("gemserve: cache_memory=0.2: has an effect only")
    assert main(["plan", "--model", "builtin", "--tokens", "5000"]) == 0
