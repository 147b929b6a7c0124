"""Linear layers packed for the CPU compute what the model's own layers compute."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from gemserve.adapters.kinds import load_adapter
from gemserve.config import EngineConfig, ModelConfig
from gemserve.contract.adapters import LoadedAdapter
from gemserve.contract.events import Finished, TextDelta
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.build import assemble
from gemserve.engine.core import Core
from gemserve.model.base_model import base_of
from gemserve.model.cpu.packed_linear import PackedLinear, can_pack, with_packed_linears
from gemserve.model.loading.loader import load
from tests import adapters, models

BF16 = torch.bfloat16
pytestmark = pytest.mark.skipif(
    not can_pack(torch.device("cpu"), BF16), reason="this CPU has no bfloat16 in oneDNN"
)


def answer(core: Core, adapter: LoadedAdapter | None = None) -> list[int]:
    request = Request(
        request_id="a",
        prompt_ids=list(range(3, 90)),
        filter=FilterParams(method="none", keep=64),
        sampling=SamplingParams(max_tokens=12, temperature=0, ignore_eos=True),
        adapter=adapter,
    )
    events = list(core.run_alone(request))
    assert isinstance(events[-1], Finished)
    return [t for event in events if isinstance(event, TextDelta) for t in event.token_ids]


def unpacked_and_packed(directory: Path) -> tuple[Core, Core]:
    engine = EngineConfig(calibrate="off", filter_method="none", kv_memory_bytes=1 << 24)
    cores = []
    for dtype in ("float32", "bfloat16"):
        loaded = load(ModelConfig(model=str(directory), device="cpu", dtype=dtype))
        cores.append(assemble(loaded, engine))
    return cores[0], cores[1]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 3, 200])
def test_a_packed_layer_is_the_layer(bias: bool, rows: int) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 160, bias=bias).to(BF16).requires_grad_(False)
    packed = PackedLinear(linear)
    x = torch.randn(1, rows, 96).to(BF16)
    with torch.inference_mode():
        expected = (x.float() @ linear.weight.float().T) + (linear.bias.float() if bias else 0.0)
        torch.testing.assert_close(packed(x).float(), expected, rtol=0.01, atol=0.02)
    assert torch.equal(packed.weight, linear.weight)
    names = [name for name, _ in packed.named_parameters()]
    assert sorted(names) == sorted(name for name, _ in linear.named_parameters())


def test_the_original_model_stays_as_it_is() -> None:
    model: Any = models.build("llama").to(BF16)
    packed = with_packed_linears(model)
    assert type(packed.model.layers[0].mlp.up_proj) is PackedLinear
    assert type(packed.lm_head) is PackedLinear
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear


@pytest.mark.parametrize("name", ["llama", "qwen2", "phi3-longrope"])
def test_a_bfloat16_server_answers_from_packed_layers(name: str, tmp_path: Path) -> None:
    _, packed = unpacked_and_packed(models.save(name, tmp_path))
    kinds = {type(m) for m in packed.model.hf.modules() if isinstance(m, nn.Linear)}
    assert kinds == {PackedLinear}
    plain = load(ModelConfig(model=str(tmp_path), device="cpu", dtype="bfloat16")).model
    assert base_of(packed.model) == base_of(plain), "its adapters would be refused"
    assert len(answer(packed)) == 12


def test_a_tied_head_is_packed_beside_the_embedding() -> None:
    model: Any = models.build("llama").to(BF16)
    model.lm_head.weight = model.model.embed_tokens.weight
    packed = with_packed_linears(model)
    assert type(packed.lm_head) is PackedLinear
    assert torch.equal(packed.lm_head.weight, model.model.embed_tokens.weight)
    assert dict(packed.named_parameters()).keys() == dict(model.named_parameters()).keys()


def test_float32_is_not_packed(tmp_path: Path) -> None:
    plain, _ = unpacked_and_packed(models.save("llama", tmp_path))
    assert not any(isinstance(m, PackedLinear) for m in plain.model.hf.modules())


@pytest.mark.parametrize("use_dora", [False, True])
def test_a_lora_changes_packed_layers(use_dora: bool, tmp_path: Path) -> None:
    """PEFT wraps instances of `nn.Linear` only, and DoRA reads their weights."""
    directory = models.save("llama", tmp_path / "model")
    targets = ["q_proj", "down_proj"]
    adapters.write_lora(
        tmp_path / "lora", models.build("llama"), target_modules=targets, use_dora=use_dora
    )
    _, packed = unpacked_and_packed(directory)
    path = tmp_path / "lora"
    lora = load_adapter(path.name, path, packed.model, base_of(packed.model), 1 << 24)
    before = answer(packed)
    assert answer(packed, lora) != before
    assert answer(packed) == before
