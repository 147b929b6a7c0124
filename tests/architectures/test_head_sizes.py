"""Models whose layers have other head sizes than the KV memory, which is the same for all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from gemserve.adapters import ntk, prefix
from gemserve.config import ModelConfig
from gemserve.errors import AdapterError, ModelError
from gemserve.model.families.head_sizes import find_misfit, fit
from gemserve.model.families.planned_reach import planned_shape
from gemserve.model.loading.checkpoint import HubCheckpoint
from gemserve.model.passes.causal_model import CausalModel
from gemserve_kernels.attention import reference_attention
from tests.architectures import families
from tests.architectures.compare import compare

YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "mscale": 1.0,
    "mscale_all_dim": 0.7,
    "original_max_position_embeddings": 128,
}


def _random(*size: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def test_padded_and_repeated_heads_give_the_same_attention() -> None:
    query, key, value = _random(8, 5, 24), _random(2, 9, 24, seed=1), _random(2, 9, 16, seed=2)
    wide = fit(query, key, value, 4, 32)
    assert [tuple(x.shape) for x in wide] == [(8, 5, 32), (4, 9, 32), (4, 9, 32)]
    out = reference_attention(*wide, scale=0.3).out
    weights = (query @ key.repeat_interleave(4, 0).mT * 0.3).softmax(-1)
    expected = weights @ value.repeat_interleave(4, 0)
    torch.testing.assert_close(out[..., :16], expected)
    assert not out[..., 16:].any()


@pytest.mark.parametrize(
    ("sizes", "reason"),
    [
        ((4, 16, 2, 16, 16), None),
        ((4, 16, 1, 16, 12), None),
        ((4, 16, 2, 16, 40), "values of 40 numbers"),
        ((4, 40, 2, 40, 16), "2 key heads of 40"),
        ((4, 16, 4, 16, 16), "4 key heads for 4 query heads; the KV memory is for 2 of 32"),
        ((4, 16, 2, 12, 12), "queries and keys must be of one size"),
        ((3, 16, 1, 16, 16), "for 3 query heads"),
    ],
)
def test_heads_that_do_not_fit(sizes: tuple[int, ...], reason: str | None) -> None:
    heads, size, kv_heads, key, value = sizes
    found = find_misfit(
        torch.zeros(1, heads, 2, size),
        torch.zeros(1, kv_heads, 2, key),
        torch.zeros(1, kv_heads, 2, value),
        2,
        32,
    )
    assert (found is None) == (reason is None), found
    assert reason is None or reason in str(found)


@pytest.mark.parametrize(
    ("family", "kv_heads", "head_dim"),
    [
        ("deepseek_v2", 4, 16),
        ("deepseek_v3", 4, 16),
        ("glm4_moe_lite", 4, 16),
        ("minicpm3", 4, 16),
        ("gemma4_text", 2, 32),
        ("gemma3n_text", 2, 16),
    ],
)
def test_the_plan_has_the_bytes_of_the_memory(family: str, kv_heads: int, head_dim: int) -> None:
    """They are counted from the config, before there are weights."""
    config = families.served_config(family)
    with torch.device("meta"):
        bare = AutoModelForCausalLM.from_config(config)
    planned = planned_shape(bare, torch.float32)
    assert (planned.num_kv_heads, planned.head_dim) == (kv_heads, head_dim)
    assert planned.is_padded == (family != "gemma3n_text")
    model = CausalModel(families.build(family))
    assert model.shape == planned
    memory = model.new_memory(2 * model.num_layers * 10)
    assert memory.num_bytes == planned.kept_bytes(10)


@pytest.mark.parametrize("family", ["deepseek_v2", "deepseek_v3", "glm4_moe_lite", "youtu"])
def test_mla_with_yarn_has_the_layers_own_scale(family: str) -> None:
    """YaRN's mscale is in the scale that a layer hands over, not in its keys' size."""
    compared = compare(family, rope_parameters=YARN)
    assert compared.is_equal, compared
    attention = families.build(family, rope_parameters=YARN).model.layers[0].self_attn
    assert attention.scaling != pytest.approx(attention.qk_head_dim**-0.5)


@pytest.mark.parametrize("values", [8, 12, 16, 24])
def test_values_smaller_and_larger_than_keys(values: int) -> None:
    compared = compare("deepseek_v3", v_head_dim=values)
    assert compared.is_equal, compared


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_kv_shared_layers": 0},
        {"attention_k_eq_v": False},
        {"hidden_size_per_layer_input": 0, "num_kv_shared_layers": 0},
        {"global_head_dim": 8, "num_key_value_heads": 1, "attention_k_eq_v": False},
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
    ],
)
def test_layers_of_gemma4(changes: dict[str, Any]) -> None:
    compared = compare("gemma4_text", **changes)
    assert compared.is_equal, compared


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_upper_layers_have_the_keys_of_lower_ones(family: str) -> None:
    """They had keys of their own in tests whose config shared none."""
    hf = families.build(family)
    assert [layer.self_attn.is_kv_shared_layer for layer in hf.model.layers] == [False] * 2 + [
        True
    ] * 2
    model = CausalModel(hf)
    kv = model.new_memory(8 * 90).kv(0, num_layers=4, capacity=90)
    ids = torch.randint(3, families.VOCAB, (90,), generator=torch.Generator().manual_seed(1))
    for low, high in ((0, 40), (40, 90)):
        model.prefill_chunk(ids[low:high].tolist(), start=low, kv=kv, rope_tokens=90, is_last=False)
    for layer in (0, 1):
        for lower, upper in zip(kv.read(layer, 90), kv.read(layer + 2, 90), strict=True):
            assert torch.equal(lower, upper)
    assert not torch.equal(*kv.read(1, 90))


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_a_checkpoint_may_have_keys_that_no_layer_uses(family: str, tmp_path: Path) -> None:
    """Published ones have projections for layers that use the keys of lower ones."""
    hf = families.build(family)
    hf.save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    for name in ("k_proj", "v_proj", "k_norm"):
        at = "model.layers.{}.self_attn." + f"{name}.weight"
        tensors[at.format(2)] = tensors[at.format(0)].clone()
    save_file(tensors, path, metadata={"format": "pt"})
    loaded = HubCheckpoint(ModelConfig(model=str(tmp_path))).load_weights(torch.float32)
    for (name, ours), (_, theirs) in zip(
        loaded.named_parameters(), hf.named_parameters(), strict=True
    ):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("family", ["gemma3n_text", "gemma4_text"])
def test_inputs_of_each_layer_count(family: str) -> None:
    """Each layer has an embedding of the token of its own: with another one, other logits."""
    logits = []
    for factor in (1.0, -1.0):
        hf = families.build(family)
        hf.model.embed_tokens_per_layer.weight.data.mul_(factor)
        model = CausalModel(hf)
        kv = model.new_memory(8 * 30).kv(0, num_layers=4, capacity=30)
        out = model.prefill_chunk(range(3, 33), start=0, kv=kv, rope_tokens=30, is_last=True)
        assert out is not None
        logits.append(out)
    assert float((logits[0] - logits[1]).abs().max()) > 0.1


def test_adapters_with_keys_of_their_own_are_refused() -> None:
    shape = CausalModel(families.build("deepseek_v3")).shape
    with pytest.raises(AdapterError, match="type 'prefix': not for this model"):
        prefix.shapes(shape, 4)
    with pytest.raises(AdapterError, match="type 'ntk': not for this model"):
        ntk.shapes(shape, shape.head_dim, 1)


def test_layers_with_other_numbers_of_query_heads_are_refused() -> None:
    with pytest.raises(ModelError, match="layers differ in num_attention_heads"):
        compare("dots3_note_text")
