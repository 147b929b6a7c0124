"""`gemserve adapter inspect` and `gemserve ask --adapter`: folders without a server."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from gemserve.cli.main import main
from gemserve.config import ModelConfig
from gemserve.model.causal import CausalModel
from gemserve.model.loader import load as load_model
from tests import adapters, models


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return CausalModel(models.build("llama"))


def inspect(path: Path, capsys: pytest.CaptureFixture[str]) -> tuple[str, dict[str, Any]]:
    """What is printed for people, and for programs."""
    assert main(["adapter", "inspect", str(path), "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    return "\n".join(lines), json.loads(last)


@pytest.mark.parametrize("kind", ["ntk", "prefix", "activation"])
def test_one_of_ours(
    tmp_path: Path, model: CausalModel, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    made, settings = adapters.tensors(kind, model)
    text, seen = inspect(adapters.write(tmp_path / "a", kind, model), capsys)
    assert (seen["type"], seen["format"], seen["settings"]) == (kind, "gemserve", settings)
    assert seen["base"]["architecture"] == "LlamaForCausalLM"
    assert len(seen["version"]) == 16
    assert seen["parameters"] == sum(t.numel() for t in made.values())
    assert seen["bytes"] == 4 * seen["parameters"]
    assert [t["name"] for t in seen["tensors"]] == sorted(made)
    for told in seen["tensors"]:
        tensor = made[told["name"]]
        assert (told["dtype"], told["shape"]) == ("float32", list(tensor.shape))
        assert told["norm"] == pytest.approx(float(tensor.norm()), rel=1e-5)
        if kind == "activation":
            assert told["layer_norms"] is None
        else:
            assert told["layer_norms"] == pytest.approx([float(t.norm()) for t in tensor], rel=1e-5)
        assert f"norm {told['norm']:.4g}" in text
    assert f"{seen['parameters']:,} in {seen['bytes']:,} bytes" in text


@pytest.mark.parametrize("kind", ["lora", "prefix"])
def test_one_of_peft_s(tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]) -> None:
    adapters.write_peft(tmp_path / "a", models.build("llama"), kind)
    text, seen = inspect(tmp_path / "a", capsys)
    assert (seen["type"], seen["format"], seen["base"]) == (kind, "peft", None)
    if kind == "lora":
        assert seen["settings"]["r"] == 4
        assert len(seen["tensors"]) == 4 * 2 * 2
        assert {t["layer_norms"] for t in seen["tensors"]} == {None}
    else:
        [told] = seen["tensors"]
        assert len(told["layer_norms"]) == 4
        assert math.hypot(*told["layer_norms"]) == pytest.approx(told["norm"])
    assert "not said" in text


def test_what_a_server_would_refuse_can_be_seen(
    tmp_path: Path, model: CausalModel, capsys: pytest.CaptureFixture[str]
) -> None:
    """Values that are not finite, an unknown type, integers: that is what it is for."""
    made = {
        "keys": torch.tensor([[1.0, float("nan"), float("inf")], [3.0, 4.0, 0.0]]),
        "odd": torch.arange(3),
        "none": torch.zeros(2, 0),
    }
    folder = adapters.write(tmp_path / "a", "prefix", model, made=made)
    path = folder / "adapter.json"
    path.write_text(path.read_text().replace('"settings": {}', '"settings": {"lr": NaN}'))
    text, seen = inspect(folder, capsys)
    keys, none, odd = seen["tensors"]
    assert (keys["not_finite"], keys["norm"], keys["layer_norms"]) == (2, None, [None, 5.0])
    assert (none["parameters"], odd["dtype"]) == (0, "int64")
    assert seen["settings"] == {"lr": "nan"}
    assert "2 values not finite" in text
    path.write_text(path.read_text().replace('"type": "prefix"', '"type": "magic"'))
    assert inspect(folder, capsys)[1]["type"] == "magic"


def test_mistakes_are_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path / "nowhere", tmp_path):
        assert main(["adapter", "inspect", str(path)]) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"gemserve: {path}: ")
        assert error.count("\n") == 1
    for words in (["adapter"], ["adapter", "inspect"], ["adapter", "inspect", ".", "--js"]):
        with pytest.raises(SystemExit) as stopped:
            main(words)
        assert stopped.value.code == 2


def test_ask_with_an_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load_model(ModelConfig(device="cpu")).model
    strong = {"vector": 20 * adapters.tensors("activation", model)[0]["vector"]}
    adapters.write(tmp_path / "a", "activation", model, made=strong)
    adapters.write(tmp_path / "other", "prefix", CausalModel(models.build("llama")))
    notes = tmp_path / "notes"
    notes.write_text("The code for the lantern is 48213. " + "The river runs. " * 20)
    monkeypatch.setenv("GEMSERVE_ADAPTER", "a=a")  # a server's
    ask = ["ask", str(notes), "What is the code for the lantern?", "--kv-memory", "64MiB"]
    said = []
    for words in ([], ["--adapter", str(tmp_path / "a")]):
        assert main([*ask, *words]) == 0
        said.append(capsys.readouterr().out)
    assert "48213" in said[0]
    assert said[0] != said[1]
    assert main([*ask, "--adapter", str(tmp_path / "other")]) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert f"adapter={tmp_path / 'other'}: made for another model: num_layers 4, not" in error
