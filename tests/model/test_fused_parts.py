"""A model with fused norms, gates and rotations computes what its own modules compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from gemserve.model import fused_parts
from gemserve.model.fused_parts import can_launch_parts, with_fused_parts
from gemserve_kernels.native_library import CannotCompile
from tests.architectures import families
from tests.compiled_step import compiled_step, needs_compiler
from tests.kernels.twins import DEVICE, twin

pytestmark = needs_compiler
IDS = torch.arange(3, 60).unsqueeze(0)


@pytest.fixture(scope="module", autouse=True)
def compiled() -> Iterator[None]:
    with compiled_step():
        yield


def both(family: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Any, Any]:
    model: Any = families.build(family, head_dim=32).to(dtype).eval()
    return model, with_fused_parts(model)


def changed(plain: Any, fused: Any) -> set[str]:
    pairs = zip(plain.modules(), fused.modules(), strict=True)
    return {type(a).__name__ for a, b in pairs if type(a) is not type(b)}


def logits(model: Any) -> torch.Tensor:
    with torch.inference_mode():
        ids = IDS.to(model.device)
        return model(ids).logits.float()  # type: ignore[no-any-return]


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


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma3_text", "phi3", "granite", "olmo2"])
def test_float32_is_fused_too(family: str) -> None:
    plain, fused = both(family, torch.float32)
    assert changed(plain, fused) == changed(*both(family))
    torch.testing.assert_close(logits(fused), logits(plain), rtol=1e-4, atol=1e-5)


def test_float16_stays_as_it_is_on_a_cpu() -> None:
    plain, fused = both("llama", torch.float16)
    assert fused is plain


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
    other = fused.model.norm(states.to(torch.float16))
    assert torch.equal(other, plain.model.norm(states.to(torch.float16)))
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


class Counted:
    """Triton's parts, which count what they are asked for."""

    def __init__(self) -> None:
        self.parts = twin("triton_parts").TritonParts(DEVICE.type)
        self.device, self.dtypes, self.lanes = DEVICE.type, self.parts.dtypes, self.parts.lanes
        self.calls: Counter[str] = Counter()

    def _count(self, name: str, *given: Any) -> Any:
        self.calls[name] += 1
        return getattr(self.parts, name)(*given)

    def norm(self, *given: Any) -> Any:
        return self._count("norm", *given)

    def gate(self, *given: Any) -> Any:
        return self._count("gate", *given)

    def rotate_both(self, *given: Any) -> Any:
        return self._count("rotate_both", *given)


@pytest.mark.parametrize(
    ("family", "dtype", "norms", "gates"),
    [
        ("llama", torch.bfloat16, 9, 4),
        ("llama", torch.float16, 9, 4),
        ("gemma3_text", torch.bfloat16, 0, 4),
    ],
)
def test_every_part_is_a_launch_of_triton(
    family: str, dtype: torch.dtype, norms: int, gates: int
) -> None:
    plain: Any = families.build(family, dtype=dtype).to(DEVICE)
    parts = Counted()
    fused = with_fused_parts(plain, parts)
    parts.calls.clear()
    of_plain, of_fused = logits(plain), logits(fused)
    expected = {"norm": norms, "gate": gates, "rotate_both": 4}
    assert parts.calls == {name: count for name, count in expected.items() if count}
    exact = logits(plain.float())
    error, of_own = ((got - exact).abs().mean() for got in (of_fused, of_plain))
    assert float(error) < 1.5 * float(of_own) + 1e-6


def test_which_models_have_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused_parts, "find_spec", lambda _: object())
    cuda = torch.device("cuda")
    assert can_launch_parts(cuda, torch.float16)
    assert not can_launch_parts(cuda, torch.float32)
    assert not can_launch_parts(torch.device("cpu"), torch.bfloat16)
    monkeypatch.setattr(fused_parts, "find_spec", lambda _: None)
    assert not can_launch_parts(cuda, torch.float16)


def test_compiled_code_and_triton_have_classes_of_their_own() -> None:
    plain, compiled = both("llama")
    launched = with_fused_parts(plain.to(DEVICE), twin("triton_parts").TritonParts(DEVICE.type))
    assert len({type(model.model.norm) for model in (plain, compiled, launched)}) == 3


def test_layers_that_rest_elsewhere_stay_as_they_are() -> None:
    plain: Any = families.build("llama", dtype=torch.bfloat16)
    plain.model.layers[2:].to("meta")
    fused = with_fused_parts(plain)
    first, last = (changed(plain.model.layers[i], fused.model.layers[i]) for i in (0, 3))
    assert (len(first), len(last)) == (3, 0)
