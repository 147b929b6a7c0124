"""Scores against definitions written out head by head and row by row."""

from __future__ import annotations

import pytest
import torch

from gemserve_kernels import largest_attention, pooled, raw_scores


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
@pytest.mark.parametrize("rows", [[36], [0, 5, 36], [3, 4, 5], list(range(37))])
def test_largest_attention_is_of_causal_softmaxes(rows: list[int], softcap: float | None) -> None:
    """Rows need not be the last ones: each sees what stands before it, and itself."""
    query, key = tensors(4, 2, len(rows), 37)
    expected = torch.zeros(37)
    for row, position in enumerate(rows):
        visible = position + 1
        for head in range(4):
            dots = key[head // 2, :visible] @ query[head, row] * 0.2
            if softcap is not None:
                dots = softcap * torch.tanh(dots / softcap)
            expected[:visible] = torch.maximum(expected[:visible], dots.softmax(-1))
    actual = largest_attention(query, key, torch.tensor(rows), scale=0.2, softcap=softcap)
    torch.testing.assert_close(actual, expected, atol=1e-6, rtol=1e-5)


def test_pooling_pads_with_zeros_and_counts_them() -> None:
    scores = torch.tensor([5.0, 0.0, 0.0, 10.0])
    torch.testing.assert_close(pooled(scores, kind="mean"), torch.tensor([1.0, 3.0, 3.0, 2.0]))
    torch.testing.assert_close(pooled(scores, kind="max"), torch.tensor([5.0, 10.0, 10.0, 10.0]))
    rows = torch.stack([scores, 2 * scores])
    torch.testing.assert_close(pooled(rows, kind="mean")[1], 2 * pooled(scores, kind="mean"))
    with pytest.raises(ValueError, match="pooling='median'"):
        pooled(scores, kind="median")
