"""Adapters whose numbers overflow: they are refused when they are loaded, with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from gemserve.adapters.adapter_store import AdapterStore
from gemserve.errors import AdapterError
from gemserve.model.passes.causal_model import CausalModel
from tests import adapters, models

MIB = 1 << 20


@pytest.fixture(scope="module")
def model() -> CausalModel:
    return CausalModel(models.build("llama"))


def load(model: CausalModel, root: Path) -> None:
    AdapterStore(model, root, MIB).load("a", "a")


@pytest.mark.parametrize(
    ("kind", "factors", "said"),
    [
        ("ntk", {"z_a": 1e30, "z_b": 1e30}, "layer 0: z_a, z_b and k give outputs of"),
        ("ntk", {"z_b": 1e25}, "layer 0: z_a, z_b and k give outputs of"),
        ("ntk", {"k": 3e38}, "layer 0: z_a, z_b and k give outputs of"),
        ("prefix", {"keys": 1e20}, "tensor 'keys': holds"),
        ("prefix", {"values": 1e20}, "tensor 'values': holds"),
        ("activation", {"vector": 1e25}, "tensor 'vector': holds"),
    ],
)
def test_ours_are_refused(
    tmp_path: Path, model: CausalModel, kind: str, factors: dict[str, float], said: str
) -> None:
    """They were loaded, and every request with them was an error or had an answer of no sense."""
    made, _ = adapters.tensors(kind, model)
    spoilt = {name: tensor * factors.get(name, 1.0) for name, tensor in made.items()}
    adapters.write(tmp_path / "a", kind, model, made=spoilt)
    with pytest.raises(AdapterError, match=r"squares of values above|NaN or infinite") as caught:
        load(model, tmp_path)
    assert said in str(caught.value)


def test_large_numbers_with_an_ordinary_quotient_are_taken(
    tmp_path: Path, model: CausalModel
) -> None:
    """Z and k are multiples of attention's weight, which may be e^60 in some heads."""
    made, _ = adapters.tensors("ntk", model)
    large = {**made, "z_b": made["z_b"] * 1e26, "k": made["k"] * 1e26}
    adapters.write(tmp_path / "a", "ntk", model, made=large)
    load(model, tmp_path)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda name, t: t * 1e12, "for inputs of ±1, above the limit"),
        (lambda name, t: t * (1e20 if "lora_A" in name else 1.0), "squares of values above"),
        (lambda name, t: t * float("inf"), "holds NaN or infinite values"),
    ],
)
def test_a_lora_is_refused(
    tmp_path: Path,
    model: CausalModel,
    change: Callable[[str, torch.Tensor], torch.Tensor],
    said: str,
) -> None:
    adapters.write_lora(tmp_path / "a", models.build("llama"), target_modules=["q_proj"])
    path = tmp_path / "a" / "adapter_model.safetensors"
    save_file({name: change(name, t) for name, t in load_file(path).items()}, path)
    with pytest.raises(AdapterError, match=said):
        load(model, tmp_path)
