"""Scores against definitions written out head by head and row by row."""

from __future__ import annotations

import pytest
import torch

from gemserve_kernels import pooled, raw_scores, window_attention


def tensors(heads: int, kv_heads: int, window: int, keys: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(heads + keys)
    query = torch.randn(heads, window, 24, generator=generator)
    return query, torch.randn(kv_heads, keys, 24, generator=generator)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (8, 2), (6, 1)])
def test_raw_scores_sum_every_query_head(heads: int, kv_heads: int, softcap: float | None) -> None:
    query, key = tensors(heads, kv_heads, 1, 37)
    expected = torch.zeros(37)
    for head in range(heads):
        dots = key[head // (heads // kv_heads)] @ query[head, 0]
        expected += dots if softcap is None else softcap * torch.tanh(dots * 0.2 / softcap)
    actual = raw_scores(query[:, 0], key, scale=0.2, softcap=softcap)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-5)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [1, 3, 37])
def test_window_attention_is_of_causal_softmaxes(window: int, softcap: float | None) -> None:
    query, key = tensors(4, 2, window, 37)
    expected = torch.zeros(37)
    last = torch.zeros(4, 37)
    for row in range(window):
        visible = 37 - window + row + 1
        best = torch.zeros(37)
        for head in range(4):
            dots = key[head // 2, :visible] @ query[head, row] * 0.2
            if softcap is not None:
                dots = softcap * torch.tanh(dots / softcap)
            best[:visible] = torch.maximum(best[:visible], dots.softmax(-1))
            last[head, :visible] = dots.softmax(-1)
        expected += best
    actual = window_attention(query, key, scale=0.2, softcap=softcap)
    torch.testing.assert_close(actual.largest, expected, atol=1e-6, rtol=1e-5)
    torch.testing.assert_close(actual.last, last, atol=1e-6, rtol=1e-5)


def test_pooling_pads_with_zeros_and_counts_them() -> None:
    scores = torch.tensor([5.0, 0.0, 0.0, 10.0])
    torch.testing.assert_close(pooled(scores, kind="mean"), torch.tensor([1.0, 3.0, 3.0, 2.0]))
    torch.testing.assert_close(pooled(scores, kind="max"), torch.tensor([5.0, 10.0, 10.0, 10.0]))
    rows = torch.stack([scores, 2 * scores])
    torch.testing.assert_close(pooled(rows, kind="mean")[1], 2 * pooled(scores, kind="mean"))
    with pytest.raises(ValueError, match="pooling='median'"):
        pooled(scores, kind="median")
