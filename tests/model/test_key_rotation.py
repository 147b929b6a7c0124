"""Keys that are moved to other positions: for a filter that looks over long distances."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import (
    CohereConfig,
    CohereForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PhiConfig,
    PhiForCausalLM,
)

from gemserve.filtering.selector import LayerEvidence
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.rope import KeyRotation
from tests import models


def further(**sizes: Any) -> dict[str, Any]:
    """Models that rotate a part of each head, neighbouring numbers, or layers differently."""
    return {
        "phi, a part": PhiForCausalLM(PhiConfig(**sizes, partial_rotary_factor=0.5)),
        "cohere, interleaved": CohereForCausalLM(CohereConfig(**sizes)),
        "gemma3, by layer": Gemma3ForCausalLM(
            Gemma3TextConfig(
                **sizes,
                head_dim=16,
                sliding_window=64,
                layer_types=["full_attention"] + ["sliding_attention"] * 3,
            )
        ),
    }


@pytest.mark.parametrize(
    "name",
    [*(n for n in models.ARCHITECTURES if n != "opt"), *further(**models.SIZES)],
)
def test_moved_keys_are_those_of_the_other_position(name: str) -> None:
    """Style, share of rotated dimensions and scaling differ between families."""
    others = further(**models.SIZES)
    model = CausalModel(others[name] if name in others else models.build(name))
    count, far = 6, 40
    ids = [5] * (count + far)
    keys = model.filter_pass_of(ids, 0).keys(0, len(ids))
    move = model.key_mover(0, len(ids))
    assert move is not None
    moved = move(keys[:, :count], torch.full((count,), far))
    torch.testing.assert_close(moved, keys[:, far:].float(), rtol=1e-3, atol=1e-4)


def test_keys_that_are_not_rotated_are_left_alone() -> None:
    """OPT adds positions to the embeddings: nothing moves a key afterwards."""
    assert CausalModel(models.build("opt")).key_mover(2, 64) is None


def test_a_rotation_of_another_kind_fails_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys stay where they are if a model's rotation cannot be called like most models'."""
    model = CausalModel(models.build("llama"))
    calls = []

    def moved(self: KeyRotation, keys: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
        calls.append(shifts)
        raise TypeError("apply_rotary_pos_emb() missing 1 required positional argument")

    monkeypatch.setattr(KeyRotation, "moved", moved)
    assert model.key_mover(1, 64) is None
    assert len(calls) == 2  # layers 0 and 1, once each


@pytest.mark.parametrize("name", ["llama", "phi3-longrope"])
def test_every_layer_is_tried(name: str) -> None:
    model = CausalModel(models.build(name))
    assert all(model.key_mover(layer, 64) for layer in range(model.num_layers))


def evidence(num_tokens: int) -> LayerEvidence:
    return LayerEvidence(
        queries=torch.zeros(1, 1, 4),
        keys=torch.zeros(1, num_tokens, 4),
        scale=1.0,
        softcap=None,
        move_keys=lambda keys, shifts: keys + shifts[None, :, None],
    )


def test_no_key_is_further_than_the_ceiling() -> None:
    layer = evidence(10)
    shifts = layer.keys_near(layer.keys, [8, 9], ceiling=5)[0, :, 0].tolist()
    assert shifts == [3, 2, 1, 0, 0, 0, 0, 0, 0, 0]
    # rows in front of a gap, such as a question before its document, do not count
    assert layer.keys_near(layer.keys, [0, 1, 8, 9], ceiling=5)[0, 0, 0] == 3
    assert layer.keys_near(layer.keys, [4, 5], ceiling=5) is layer.keys
    assert replace(layer, move_keys=None).keys_near(layer.keys, [8, 9], 5) is layer.keys
