"""How far back layers attend: from the masks that transformers makes, and from no others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import masking_utils
from transformers.models.llama import modeling_llama

from gemserve.errors import ModelError
from gemserve.model.families.reach import Reach, find_reaches
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.shape import shape_of
from tests import models


def a_gap(batch: Any, head: Any, query: Any, key: Any) -> Any:
    return (key % 7 != 3) | (key == query)


def test_a_mask_with_gaps_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a layer sees is compared key by key, and not only counted."""
    hf: Any = models.build("llama")
    make = masking_utils.create_causal_mask
    monkeypatch.setattr(
        modeling_llama, "create_causal_mask", lambda **given: make(**given, and_mask_function=a_gap)
    )
    with pytest.raises(ModelError, match="neither causal nor a sliding window nor chunks"):
        find_reaches(hf, shape_of(hf, torch.float32))


def test_a_window_that_the_mask_does_not_have_is_refused() -> None:
    """The layer hands one to its attention function, and transformers' masks have another."""
    hf: Any = models.build("mistral-window")
    layer = hf.model.layers[1].self_attn
    layer.config = layer.config.__class__(**{**layer.config.to_dict(), "sliding_window": 50})
    layer.config._attn_implementation = "gemserve-reach"
    with pytest.raises(ModelError, match=r"layer 1 has sliding_window=50.* the last 100 tokens"):
        find_reaches(hf, shape_of(hf, torch.float32))


@pytest.mark.parametrize(
    ("reach", "first"),
    [
        (Reach(), [0, 0, 0, 0]),
        (Reach(window=3), [0, 0, 2, 98]),
        (Reach(chunk=3), [0, 0, 3, 99]),
    ],
)
def test_the_first_token_that_is_seen(reach: Reach, first: list[int]) -> None:
    positions = [0, 2, 4, 100]
    assert [reach.first(position) for position in positions] == first
    assert reach.first(torch.tensor(positions)).tolist() == first


def test_looking_at_a_model_leaves_nothing_behind() -> None:
    hf = models.build("qwen2-window")
    before = hf.config._attn_implementation
    find_reaches(hf, shape_of(hf, torch.float32))
    assert hf.config._attn_implementation == before
    assert CausalModel(hf).sliding_windows == (100, 100, None, None)
