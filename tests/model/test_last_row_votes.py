"""FastKV's and CLAA's rules against plain transcriptions over transformers' own attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from gemserve.config import EngineConfig
from gemserve.contract.events import Filtered
from gemserve.contract.filter_options import FilterMethod, FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.model.passes.causal_model import CausalModel
from tests import models
from tests.cores import core_over
from tests.model.test_selection import NoText, assert_same_up_to_ties, random_ids

KEEP = 48


def voted(name: str, ids: list[int], layer: int) -> list[float]:
    """What the last 8 rows of one layer pay to each token: the mean over heads, of rows the sum."""
    hf = models.build(name)
    hf.set_attn_implementation("eager")
    with torch.no_grad():
        out: Any = hf(input_ids=torch.tensor([ids]), use_cache=False, output_attentions=True)
    shares = out.attentions[layer][0].double()  # [heads, rows, tokens]
    heads = shares.shape[0]
    return [
        sum(float(shares[h, row, j]) for h in range(heads) for row in range(-8, 0)) / heads
        for j in range(len(ids))
    ]


def pooled_over_7(votes: list[float]) -> list[float]:
    padded = [0.0] * 3 + votes + [0.0] * 3
    return [sum(padded[j : j + 7]) / 7 for j in range(len(votes))]


def chosen(name: str, ids: list[int], method: FilterMethod, layer: int, size: int) -> list[int]:
    config = EngineConfig(
        kv_memory_bytes=16 << 20,
        filter_min_tokens=0,
        filter_layer=layer,
        min_chunk_tokens=size,
        max_chunk_tokens=size,
    )
    core = core_over(CausalModel(models.build(name)), NoText(), config, frozenset())
    request = Request(
        request_id="r",
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=1),
        filter=FilterParams(method=method, keep=KEEP, return_selection=True),
        selects_only=True,
        question=((3, 9),),  # which these methods do not know of
    )
    (report,) = [e.report for e in core.run_alone(request) if isinstance(e, Filtered)]
    assert report.selection is not None
    assert report.coverage is None
    return [p for start, stop in report.selection for p in range(start, stop)]


@pytest.mark.parametrize("size", [7, 2048])
@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize(
    ("method", "layer", "looking"),
    [("fastkv", 2, [2]), ("claa", 3, [0, 1, 2, 3]), ("claa", 1, [0, 1]), ("fastkv", 0, [0])],
)
def test_the_rule_is_the_published_one(
    method: FilterMethod, layer: int, looking: list[int], name: str, size: int
) -> None:
    """The votes of layers are compared before pooling, and the voters themselves are kept."""
    ids = random_ids(300, seed=7)
    votes = [voted(name, ids, each) for each in looking]
    scores = pooled_over_7([max(column) for column in zip(*votes, strict=True)])
    highest = max(scores)
    scores[-8:] = [highest + 1] * 8
    actual = chosen(name, ids, method, layer, size)
    assert set(range(292, 300)) <= set(actual)
    # what stands between the voters, whose scores are far higher, and the rest
    others = [p for p in actual if p < 292]
    assert_same_up_to_ties(others, scores[:292], KEEP - 8)
