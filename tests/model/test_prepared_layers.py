"""Layers of some families are changed so that gemserve's passes can run them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.jamba.modeling_jamba import mamba_selective_scan

from gemserve.model.families.prepared_layers import prepare
from gemserve.model.families.selective_scan import selective_scan
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.shared_tree import shared_tree
from tests.architectures import families
from tests.architectures.compare import compare

CHANNELS, SIZE = 6, 4


def scan_inputs(num_tokens: int, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    def random(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator)

    generator = torch.Generator().manual_seed(4)
    return {
        "hidden_states": random(2, CHANNELS, num_tokens).to(dtype),
        "dt": random(2, CHANNELS, num_tokens).to(dtype),
        "A": -random(CHANNELS, SIZE).exp(),
        "B": random(2, SIZE, num_tokens).to(dtype),
        "C": random(2, SIZE, num_tokens).to(dtype),
        "D": random(CHANNELS),
        "z": random(2, CHANNELS, num_tokens).to(dtype),
        "delta_bias": random(CHANNELS),
    }


def scanned(
    state: torch.Tensor, given: dict[str, torch.Tensor], tokens: slice
) -> tuple[torch.Tensor, torch.Tensor]:
    one_each = ("A", "D", "delta_bias")
    some = {name: x if name in one_each else x[..., tokens] for name, x in given.items()}
    return selective_scan(state, **some)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("cuts", [(), (1,), (63, 64, 66), (130,)])
def test_a_scan_in_parts_is_that_of_transformers(cuts: tuple[int, ...], dtype: torch.dtype) -> None:
    """Its own begins without a state, so the second chunk of a prompt began anew."""
    given = scan_inputs(150, dtype)
    theirs, last = mamba_selective_scan(**given, delta_softplus=True, return_last_state=True)
    state, outs = torch.zeros(2, CHANNELS, SIZE), []
    for low, high in zip((0, *cuts), (*cuts, 150), strict=True):
        out, state = scanned(state, given, slice(low, high))
        outs.append(out)
    limit = 1e-5 if dtype == torch.float32 else 0.02
    ours = torch.cat(outs, dim=-1)
    assert float((ours - theirs).abs().max()) < limit * float(theirs.abs().max())
    assert float((state - last).abs().max()) < limit * float(last.abs().max())


def test_a_given_state_is_left_as_it_is() -> None:
    """A pass that is abandoned is repeated from it."""
    state = torch.ones(2, CHANNELS, SIZE)
    _, after = scanned(state, scan_inputs(5, torch.float32), slice(0, 5))
    assert torch.equal(state, torch.ones(2, CHANNELS, SIZE))
    assert not torch.equal(after, state)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("stablelm", {"qk_layernorm": True, "use_qkv_bias": True}),
        ("stablelm", {"use_parallel_residual": True}),
        ("minimax", {"sliding_window": families.WINDOW}),
        ("zamba2", {"use_shared_attention_adapter": False, "use_mem_rope": False}),
        ("zamba2", {"layers_block_type": ["hybrid"] * 4, "num_mem_blocks": 2}),
        ("zamba", {"n_mamba_heads": 1}),
        ("jamba", {"num_experts": 1}),
        ("jamba", {"mamba_d_conv": 2, "mamba_expand": 1}),
    ],
)
def test_kinds_of_a_family(family: str, changes: dict[str, Any]) -> None:
    compared = compare(family, **changes)
    assert compared.is_equal, compared


@pytest.mark.parametrize("family", ["stablelm", "nemotron", "jamba"])
def test_a_copy_of_a_model_runs_its_own_weights(family: str) -> None:
    """An adapter's model is a copy with other modules in some places."""

    def logits(model: CausalModel) -> torch.Tensor:
        kv = model.new_memory(8 * 30).kv(0, num_layers=4, capacity=30)
        out = model.prefill_chunk(range(3, 33), start=0, kv=kv, rope_tokens=30, is_last=True)
        assert out is not None
        return out

    model = CausalModel(families.build(family))
    before, tree = logits(model), shared_tree(model.hf)
    attention = tree.model.layers[1].self_attn
    attention.v_proj = nn.Linear(64, attention.v_proj.out_features, bias=False)
    assert not torch.allclose(logits(model.variant(tree)), before, atol=1e-2)
    assert torch.equal(logits(model), before)


def test_layers_are_changed_once() -> None:
    for family in ("stablelm", "jamba"):
        layers = families.build(family).model.layers
        prepare(layers)
        kinds = [type(module) for module in layers.modules()]
        prepare(layers)
        assert [type(module) for module in layers.modules()] == kinds
