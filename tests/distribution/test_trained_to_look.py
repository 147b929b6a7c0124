"""Heads that are trained to look: the script that trains them, and the reader that it leaves."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.quality import trained_to_look
from gemserve.config import ModelConfig
from gemserve.model.loading.loader import load


def test_only_the_layers_below_the_heads_change(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = ["--model", "builtin", "--heads", "2.1", "--steps", "3", "--samples", "1"]
    options += ["--lr", "0.01", "--out", str(tmp_path), "--json"]
    monkeypatch.setattr("sys.argv", ["trained_to_look.py", *options])
    trained_to_look.main()
    before, after = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert (before["when"], after["when"]) == ("before", "after")
    assert before["questions"] == after["questions"] > 0
    plain, trained = (
        load(ModelConfig(model=name, weights="dense", dtype="float32")).model.hf.state_dict()
        for name in ("builtin", str(tmp_path))
    )
    assert plain.keys() == trained.keys()
    layers = {name.split(".layers.")[-1].partition(".")[0] for name in changed(plain, trained)}
    assert layers == {"0", "1", "2"}


def changed(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> list[str]:
    """The names of the matrices that differ by more than a rounding to bfloat16."""
    pairs = ((name, tensor.to(torch.bfloat16), other[name]) for name, tensor in one.items())
    return [name for name, a, b in pairs if not torch.equal(a, b.to(torch.bfloat16))]
