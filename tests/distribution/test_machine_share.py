"""The benchmark that compares reading and decoding with what the machine does at best."""

from __future__ import annotations

import json

import pytest

from benchmarks.speed import machine_share


def test_all_rows_have_a_share(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine_share, "_MEMORY_BYTES", 1 << 22)
    monkeypatch.setattr(machine_share, "_ROWS", 64)
    given = ["--model", "builtin", "--lengths", "64", "--sequences", "1,2", "--steps", "2"]
    given += ["--reading", "float32,float32:aten-cpu", "--stepping", "float32:off"]
    given += ["--prompt-tokens", "20", "--repeats", "1", "--json"]
    monkeypatch.setattr("sys.argv", ["machine_share.py", *given])
    machine_share.main()
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    ceilings = [row for row in rows if "measured" in row]
    assert [row["what"].split(",")[0] for row in ceilings] == [
        "torch.float32 products",
        "products of bytes",
        "memory",
    ]
    assert all(row["measured"] > 0 for row in ceilings)
    shares = [(row["what"], row["way"]) for row in rows if row.get("share", 0) > 0]
    assert shares == [
        ("reading 64 tokens", "float32"),
        ("reading 64 tokens", "float32:aten-cpu"),
        ("step of 1", "float32:off"),
        ("step of 2", "float32:off"),
    ]
