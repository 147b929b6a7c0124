"""A model with fused norms, gates and rotations computes what its own modules compute."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from gemserve.model.cpu import fused_parts
from gemserve.model.cpu.fused_parts import with_fused_parts
from gemserve_kernels.native_library import CannotCompile
from tests.architectures import families
from tests.compiled_step import compiled_step, needs_compiler

pytestmark = needs_compiler
IDS = torch.arange(3, 60).unsqueeze(0)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> Iterator[None]:
    with compiled_step():
        yield


def both(family: str) -> tuple[Any, Any]:
    model: Any = families.build(family, head_dim=32).to(torch.bfloat16).eval()
    return model, with_fused_parts(model)


def changed(plain: Any, fused: Any) -> set[str]:
    pairs = zip(plain.modules(), fused.modules(), strict=True)
    return {type(a).__name__ for a, b in pairs if type(a) is not type(b)}


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        return model(IDS).logits.float()  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("family", "parts"),
    [
        ("llama", {"LlamaRMSNorm", "LlamaMLP", "LlamaAttention"}),
        ("qwen3", {"Qwen3RMSNorm", "Qwen3MLP", "Qwen3Attention"}),
        ("gemma3_text", {"Gemma3MLP", "Gemma3Attention"}),  # its norms multiply by 1 + weight
        ("phi3", {"Phi3RMSNorm", "Phi3Attention"}),  # gate and up are one matrix
        ("granite", {"GraniteRMSNorm", "GraniteMLP", "GraniteAttention"}),
        ("olmo2", {"Olmo2RMSNorm", "Olmo2MLP", "Olmo2Attention"}),
        ("gpt_oss", {"GptOssRMSNorm"}),  # cosines are given for half of a head
        ("opt", set()),
    ],
)
def test_logits_are_those_of_the_model(family: str, parts: set[str]) -> None:
    plain, fused = both(family)
    assert changed(plain, fused) == parts
    of_plain, of_fused = logits(plain), logits(fused)
    exact = logits(plain.float())
    error, of_own = ((got - exact).abs().mean() for got in (of_fused, of_plain))
    assert float(error) < 1.5 * float(of_own) + 1e-6


def test_names_weights_and_the_original_stay() -> None:
    plain, fused = both("llama")
    assert type(plain.model.norm) is not type(fused.model.norm)
    assert isinstance(fused.model.norm, type(plain.model.norm))
    assert type(fused.model.norm).__name__ == "LlamaRMSNorm"
    named = dict(plain.named_parameters()), dict(fused.named_parameters())
    assert named[0].keys() == named[1].keys()
    assert all(named[0][name] is named[1][name] for name in named[0])


def test_another_dtype_and_gradients_take_the_model_s_own_way() -> None:
    plain, fused = both("llama")
    states = torch.randn(1, 4, plain.config.hidden_size)
    wide = fused.model.norm(states)
    assert torch.equal(wide, plain.model.norm(states))
    half = states.to(torch.bfloat16).requires_grad_(True)
    with torch.enable_grad():
        fused.model.layers[0].mlp(fused.model.norm(half)).float().sum().backward()
    assert half.grad is not None
    assert bool(half.grad.abs().sum() > 0)


def test_what_computes_something_else_stays_as_it_is() -> None:
    class SquareRMSNorm(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.eps = nn.Parameter(torch.ones(64, dtype=torch.bfloat16)), 1e-5

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return states * states * self.weight

    model = nn.Sequential(SquareRMSNorm())
    assert type(with_fused_parts(model)[0]) is SquareRMSNorm


def test_every_module_is_tried_with_large_numbers() -> None:
    """Some families clamp an MLP's numbers, and some do in a part of their layers only."""

    class ClampedMLP(nn.Module):
        def __init__(self, limit: float) -> None:
            super().__init__()
            self.gate_proj, self.up_proj = (nn.Linear(64, 96, bias=False) for _ in range(2))
            self.down_proj, self.act_fn = nn.Linear(96, 64, bias=False), nn.SiLU()
            self.limit = limit

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            up = self.up_proj(x).clamp(-self.limit, self.limit)
            return self.down_proj(self.act_fn(self.gate_proj(x)) * up)  # type: ignore[no-any-return]

    model = nn.Sequential(ClampedMLP(1e9), ClampedMLP(7.0)).to(torch.bfloat16)
    model.requires_grad_(False)
    fused = with_fused_parts(model)
    assert [type(part) is ClampedMLP for part in fused] == [False, True]


def test_without_a_compiler_the_model_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise CannotCompile("no compiler")

    monkeypatch.setattr(fused_parts, "open_parts", fails)
    model = families.build("llama").to(torch.bfloat16)
    assert with_fused_parts(model) is model
