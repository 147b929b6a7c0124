"""What rows attend to behind attention sinks, compared with a softmax over everything."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gemserve.filtering.segment_scores import SegmentSummary, pooled_scores
from gemserve_kernels.attention_scores import (
    attention_beside_sinks,
    attention_of_all_heads_beside_sinks,
)

HEADS, KV_HEADS, ROWS, DIM, SINKS, KEYS = 4, 2, 5, 16, 3, 40


WAYS = pytest.mark.parametrize(
    "attend", [attention_beside_sinks, attention_of_all_heads_beside_sinks]
)


@WAYS
@pytest.mark.parametrize("softcap", [None, 20.0])
def test_sums_and_shares_are_those_of_a_softmax(attend: Any, softcap: float | None) -> None:
    torch.manual_seed(0)
    query, key = torch.randn(HEADS, ROWS, DIM), torch.randn(KV_HEADS, SINKS + KEYS, DIM)
    found = attend(query, key, SINKS, most=6, num_first=2, scale=0.3, softcap=softcap)
    logits = query @ key.repeat_interleave(2, 0).transpose(1, 2) * 0.3
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    torch.testing.assert_close(found.sinks, logits[:, :, :SINKS].logsumexp(-1))
    torch.testing.assert_close(found.keys, logits[:, :, SINKS:].logsumexp(-1))
    best = logits[:, :, SINKS:].topk(6, dim=-1)
    torch.testing.assert_close(found.best, best.values)
    assert torch.equal(found.places, best.indices)
    shares = logits.softmax(-1)[:, :, SINKS:]
    torch.testing.assert_close(found.shares[0], shares[:, :2].amax(1))
    torch.testing.assert_close(found.shares[1], shares.amax(1))


@WAYS
def test_fewer_keys_than_are_listed(attend: Any) -> None:
    query, key = torch.randn(1, 2, DIM), torch.randn(1, SINKS + 4, DIM)
    found = attend(query, key, SINKS, most=8, num_first=2, scale=1.0)
    assert found.best.shape == (1, 2, 4)


def test_segments_share_one_softmax_with_the_mean_of_their_sinks() -> None:
    """The second segment's tokens get less than they would alone."""
    logits = [torch.tensor([[1.0, 3.0]]), torch.tensor([[2.0, 0.0, 1.0]])]
    sinks = [torch.tensor([2.0]), torch.tensor([4.0])]
    segments = [
        SegmentSummary(
            sinks=sink,
            keys=row.logsumexp(-1),
            best=row,
            places=torch.arange(row.shape[1])[None] + start,
            shares=torch.zeros(2, row.shape[1]),
        )
        for row, sink, start in zip(logits, sinks, (0, 3), strict=True)
    ]
    everything = torch.cat([*logits, torch.tensor([[3.0]])], dim=1).softmax(-1)[0]
    expected = torch.tensor([*everything[:2], 0.0, *everything[2:5], 0.0])
    torch.testing.assert_close(pooled_scores(segments, 7), expected)
