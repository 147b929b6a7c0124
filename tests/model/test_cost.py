"""The cost model against operations counted on a small model, and bytes really held."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from gemserve.config import EngineConfig
from gemserve.contract.events import Filtered, Finished
from gemserve.contract.filter_options import FilterMethod, FilterParams
from gemserve.contract.prompt_parts import Priority, ProtectedRange
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.cost import ModelShape
from gemserve.filtering.method_cost import MethodPlan, plan_methods, prompt_flops
from gemserve.filtering.methods import METHODS, SERVED_METHODS
from gemserve.filtering.sieve import Sieve
from gemserve.model.families.planned_reach import planned_shape
from gemserve.model.families.reach import NOTHING
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.shape import shape_of
from tests import models
from tests.architectures import families
from tests.cores import core_over
from tests.model.test_selection import NoText

LLAMA_8B = ModelShape(
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    vocab_size=128256,
    layer_params=2 * 4096 * 4096 + 2 * 4096 * 1024 + 3 * 4096 * 14336,
    qkv_params=4096 * 4096 + 2 * 4096 * 1024,
    element_bytes=2,
)


@pytest.mark.parametrize("name", ["llama", "qwen3", "phi3-longrope", "opt"])
@pytest.mark.parametrize("num_tokens", [64, 300])
def test_prefill_flops_are_those_counted(name: str, num_tokens: int) -> None:
    """Counted on eager attention, which does twice the causal work: that half is ours to drop."""
    hf = models.build(name)
    hf.config._attn_implementation = "eager"
    ids = torch.randint(3, models.VOCAB, (1, num_tokens))
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        hf(input_ids=ids, use_cache=False, logits_to_keep=1)
    shape = shape_of(hf, torch.float32)
    pairs = num_tokens * num_tokens
    dense = shape.num_layers * 4.0 * shape.num_heads * shape.head_dim * pairs
    causal = shape.num_layers * shape.attention(0, num_tokens)
    counted = counter.get_total_flops() - dense + causal
    rotary = 0.01  # cos and sin come from a small matrix product in some models
    assert prompt_flops(shape, "none", num_tokens, 16, 2) == pytest.approx(counted, rel=rotary)


def test_chunks_cost_what_the_whole_costs() -> None:
    whole = LLAMA_8B.filter_chunk(0, 1000, 13)
    parts = sum(LLAMA_8B.filter_chunk(start, 100, 13) for start in range(0, 1000, 100))
    assert parts == pytest.approx(whole)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gemma3_text", {}),
        ("mistral", {"sliding_window": 50}),
        ("gpt_oss", {}),
        ("lfm2", {}),
        ("granitemoehybrid", {}),
        ("kimi_linear", {}),
    ],
)
def test_a_plan_counts_windows_and_layers_without_attention(
    family: str, changes: dict[str, Any]
) -> None:
    """All layers counted as seeing all tokens, and as having keys and values."""
    config = families.served_config(family, **changes)
    with torch.device("meta"):
        bare = AutoModelForCausalLM.from_config(config)
    shape = planned_shape(bare, torch.float32)
    model = CausalModel(families.build(family, **changes))
    assert shape == model.shape
    positions = torch.arange(40, 240)
    pairs = [
        0 if reach == NOTHING else int((positions - reach.first(positions) + 1).sum())
        for reach in model.reaches
    ]
    assert len(set(pairs)) == 2 or family == "mistral"
    for layer in range(4):
        read = shape.filter_chunk(40, 200, layer) - 2.0 * shape.qkv_params * 200
        assert read == 2.0 * shape.layer_params * 200 * layer + shape.pair() * sum(pairs[:layer])
    having = sum(count > 0 for count in pairs)
    assert shape.kept_bytes(10) == 10 * 2 * having * shape.unit_bytes
    last = [0 if reach == NOTHING else 240 - reach.first(239) for reach in model.reaches]
    assert shape.step_attention(239) == shape.pair() * sum(last)


@pytest.mark.parametrize("method", SERVED_METHODS)
def test_planned_bytes_are_those_held(method: FilterMethod) -> None:
    core = core_over(
        CausalModel(models.build("llama")),
        NoText(),
        EngineConfig(
            kv_memory_bytes=1 << 22, filter_min_tokens=0, filter_layer=2, cache_memory=0.0
        ),
        eos_ids=frozenset(),
    )
    (row,) = plan_methods(
        core.model.shape,
        methods=(method,),
        num_tokens=500,
        keep=64,
        max_tokens=8,
        layer=2,
        memory_bytes=1 << 22,
    )
    request = Request(
        request_id="r",
        prompt_ids=list(range(6, 506)),
        sampling=SamplingParams(max_tokens=8, temperature=0.0),
        filter=FilterParams(method=method, keep=64),
    )
    core.add(request)
    peak = after = kept = 0
    while not core.is_idle:
        for _, event in core.step():
            if isinstance(event, Filtered):
                after, kept = core._pool.used, event.report.kept_tokens
        peak = max(peak, core._pool.used)
    unit, row_layers = core.model.shape.unit_bytes, core.model.num_layers
    # the plan is for the most that may be kept; whole passages may be fewer tokens
    left = 64 - kept if method == "sieve" else 0
    assert 0 <= left < Sieve().passage_limit(64)
    assert after * unit == row.decode_kv_bytes - left * 2 * row_layers * unit
    assert peak * unit == max(row.filter_kv_bytes, row.decode_kv_bytes)
    way = METHODS[method]  # below the filter layer, 2, and its keys; or all layers
    reading = 500 * 5 if way.selector else 500 * 2 * row_layers if way.evictor else 0
    assert row.filter_kv_bytes == reading * unit


def test_planned_segments_are_linear_and_hold_one_group() -> None:
    """A pass over segments takes time in proportion to the prompt, and a group's memory."""

    def planned(num_tokens: int, segment_size: int | None = 1024) -> list[MethodPlan]:
        return plan_methods(
            LLAMA_8B,
            methods=("sieve", "gemfilter"),
            num_tokens=num_tokens,
            keep=1024,
            max_tokens=50,
            layer=13,
            memory_bytes=64 << 30,
            segment_size=segment_size,
        )

    one, segments, gem = planned(131072)
    assert [(row.method, row.window) for row in (one, segments, gem)] == [
        ("sieve", None),
        ("sieve", 1024),
        ("gemfilter", None),
    ]
    kept = LLAMA_8B.prefill_chunk(0, 1024) + LLAMA_8B.head()
    twice = planned(262144)[1]
    reading = segments.prompt_flops - kept
    assert twice.prompt_flops - kept == pytest.approx(2 * reading)
    assert planned(262144)[0].prompt_flops - kept > 2.2 * (one.prompt_flops - kept)
    # a group of 8,192 tokens, and a question behind each of its segments
    assert segments.filter_kv_bytes == LLAMA_8B.filter_bytes(8192 + 8 * 64, 13)
    assert twice.filter_kv_bytes == segments.filter_kv_bytes
    assert segments.requests_filtering > 10 * one.requests_filtering
    assert segments.decode_kv_bytes == one.decode_kv_bytes
    assert len(planned(1024)) == 2  # it fits into one segment
    assert len(planned(131072, None)) == 2


def test_planned_bytes_of_segments_are_no_less_than_those_held() -> None:
    """The plan's question is the longest that is watched; these segments are full."""
    core = core_over(
        CausalModel(models.build("llama")),
        NoText(),
        EngineConfig(
            kv_memory_bytes=1 << 22, filter_min_tokens=0, filter_layer=2, cache_memory=0.0
        ),
        eos_ids=frozenset(),
    )
    ids = list(range(6, 506)) * 4
    question = ((len(ids) - 8, len(ids)),)
    request = Request(
        request_id="r",
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=8, temperature=0.0),
        filter=FilterParams(method="sieve", keep=64, window=256),
        protected=(ProtectedRange(*question[0], Priority.QUESTION),),
        question=question,
        anchor=(1,),
    )
    ended = list(core.run_alone(request))[-1]
    assert isinstance(ended, Finished)
    row = plan_methods(
        core.model.shape,
        methods=("sieve",),
        num_tokens=len(ids),
        keep=64,
        max_tokens=8,
        layer=2,
        memory_bytes=1 << 22,
        segment_size=256,
    )[1]
    assert 0.8 * row.filter_kv_bytes < ended.peak_kv_bytes <= row.filter_kv_bytes


def test_figures_of_the_design() -> None:
    """128K tokens on Llama-3.1-8B: 16 GiB read whole, 6.75 GiB filtering, 0.13 GiB at 1,024."""
    gib = 2.0**30
    assert LLAMA_8B.kept_bytes(131072) / gib == 16.0
    assert LLAMA_8B.filter_bytes(131072, 13) / gib == 6.75
    assert LLAMA_8B.kept_bytes(1024) / gib == 0.125
    none, gem = plan_methods(
        LLAMA_8B,
        methods=("none", "gemfilter"),
        num_tokens=131072,
        keep=1024,
        max_tokens=50,
        layer=13,
        memory_bytes=int(64 * gib),
    )
    assert none.bound == 1.0
    assert 2.4 < gem.bound < 32 / 13
    assert (none.requests_filtering, gem.requests_filtering) == (3, 9)
