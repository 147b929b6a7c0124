"""Models whose layers keep a recurrent or convolutional state of a sequence."""

from __future__ import annotations

import os
from base64 import b64decode
from collections.abc import Sequence
from dataclasses import replace
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from gemserve.adapters.kinds import load_adapter
from gemserve.config import EngineConfig, HostMemory
from gemserve.contract.events import Event, Filtered, Finished, TextDelta, TokenLogprob
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.prompt_parts import Priority, ProtectedRange
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.build import assemble, planned_weights
from gemserve.engine.core import Core
from gemserve.engine.scheduling.pace import Crowd
from gemserve.errors import AdapterError, ConfigError, RequestError
from gemserve.filtering.segment_scores import MOST_KEPT
from gemserve.model.base_model import base_of
from gemserve.model.loading.loader import LoadedModel, place
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.query_tap import FilterTap
from gemserve.model.rank_shard import check_divisible
from tests.architectures import families
from tests.cache_world import RandomPace
from tests.cores import core_over
from tests.model.test_selection import NoText
from tests.pipe_runner import is_piped

# a short convolution, Mamba beside attention, layers of experts alone, delta rules, and Mamba's
# first version
FAMILIES = ["lfm2", "falcon_h1", "qwen3_next", "jamba"]
if os.environ.get("GEMSERVE_TEST_FAMILIES") == "all":
    FAMILIES += ["granitemoehybrid", "nemotron_h", "qwen3_5_text"]
    FAMILIES += ["zamba", "zamba2", "minimax", "kimi_linear", "bailing_hybrid"]
UNIT = 2 * 16 * 4  # bytes of one token's keys in one layer
ANCHOR = (1, 9, 8)


class ReadFirst(RandomPace):
    """All prompts are read before any answer goes on, so that their steps have all rows."""

    def is_decode_due(self, crowd: Crowd) -> bool:
        return False


def model_of(family: str, **changes: Any) -> CausalModel:
    return CausalModel(families.build(family, max_position_embeddings=4096, **changes))


def core_of(family: str = "lfm2", **settings: Any) -> Core:
    model = model_of(family)
    seeing = [layer for layer in range(model.num_layers) if model.window_of(layer) is None]
    known = {
        "filter_layer": seeing[-1],
        "filter_min_tokens": 0,
        "kv_memory_bytes": 100_000 * UNIT,
        "min_chunk_tokens": 64,
        "max_chunk_tokens": 64,
        "max_running": 8,
    }
    core = core_over(model, NoText(), EngineConfig(**(known | settings)), frozenset())
    core._pace = ReadFirst(None, core.model.shape.layer(0, 1))
    return core


def ids_of(seed: int, count: int) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(3, families.VOCAB) for _ in range(count)]


def request(ids: list[int], method: str = "sieve", **options: Any) -> Request:
    question = len(ids) - 6, len(ids)
    is_read_whole = method == "none"
    return Request(
        request_id="r",
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=12, temperature=0, ignore_eos=True, logprobs=0),
        filter=FilterParams(
            method=method,
            keep=len(ids) if is_read_whole else 40,
            return_selection=True,
            **options,
        ),
        protected=(ProtectedRange(*question, Priority.QUESTION),),
        question=(question,),
        anchor=ANCHOR,
    )


def requests() -> list[Request]:
    """Eight of several lengths, of which four are filtered, one of them in segments."""
    asked = [request(ids_of(n, 70 + 37 * n), "none" if n % 2 else "sieve") for n in range(7)]
    return [*asked, request(ids_of(9, 900), window=256)]


def answers(core: Core, asked: Sequence[Request]) -> list[tuple[TokenLogprob, ...]]:
    """The tokens and their log-probabilities, of all requests at once."""
    jobs = [core.add(one) for one in asked]
    found: dict[int, list[TokenLogprob]] = {id(job): [] for job in jobs}
    while core.num_running or core.num_waiting:
        for job, event in core.step():
            if isinstance(event, TextDelta):
                found[id(job)] += event.logprobs
            assert not isinstance(event, Finished) or event.reason == "length", event
    core.check_integrity()
    return [tuple(found[id(job)]) for job in jobs]


def same(found: Sequence[TokenLogprob], expected: Sequence[TokenLogprob]) -> bool:
    """The same tokens, and log-probabilities but for rounding.

    A matrix times one row, two, three, and four or more are computed in different orders.
    """
    pairs = list(zip(found, expected, strict=True))
    return all(a.token_id == b.token_id and abs(a.logprob - b.logprob) < 1e-5 for a, b in pairs)


def report_of(events: Sequence[Event]) -> FilterReport:
    (report,) = (event.report for event in events if isinstance(event, Filtered))
    return report


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_beside_seven_others_is_the_answer_alone(family: str) -> None:
    """States are gathered for a step, and go back to their own sequences."""
    core = core_of(family)
    alone = [answers(core, [one])[0] for one in requests()]
    assert all(len(answer) == 12 for answer in alone)
    assert all(map(same, answers(core_of(family), requests()), alone))


@pytest.mark.parametrize("family", ["lfm2", "falcon_h1"])
def test_who_the_neighbours_are_changes_no_bit(family: str) -> None:
    """With experts it may: how many rows one has decides how its matrices are multiplied."""
    first = request(ids_of(1, 90), "none")
    beside = [[request(ids_of(seed + n, 90), "none") for n in range(7)] for seed in (10, 20)]
    one, other = (answers(core_of(family), [first, *others]) for others in beside)
    assert one[0] == other[0]
    assert one[1:] != other[1:]


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_is_that_of_transformers(family: str) -> None:
    """In chunks of 64, with 12 tokens drawn."""
    core, ids = core_of(family), ids_of(1, 150)
    (answer,) = answers(core, [request(ids, "none")])
    with torch.inference_mode(), core.model.attention_named("eager"):
        for step in answer:
            logits = core.model.hf(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
            expected = logits.float().log_softmax(-1)
            assert int(expected.argmax()) == step.token_id
            assert abs(float(expected.max()) - step.logprob) < 2e-3
            ids.append(step.token_id)


@pytest.mark.parametrize("family", FAMILIES)
def test_neighbours_of_a_cancelled_request_are_unaffected(family: str) -> None:
    asked = requests()
    alone = [answers(core_of(family), [one])[0] for one in asked]
    core = core_of(family)
    core._pace = RandomPace(Random(2), core.model.shape.layer(0, 1))  # steps of any number of rows
    jobs = [core.add(one) for one in asked]
    found: dict[int, list[TokenLogprob]] = {id(job): [] for job in jobs}
    cancelled = jobs[1], jobs[4]
    while core.num_running or core.num_waiting:
        for job, event in core.step():
            if isinstance(event, TextDelta):
                found[id(job)] += event.logprobs
        for job in cancelled:
            if len(found[id(job)]) >= 3:
                core.cancel(job)
    for job, expected in zip(jobs, alone, strict=True):
        got = tuple(found[id(job)])
        assert same(got, expected[: len(got)])
        assert job in cancelled or len(got) == 12
    # their places are free, and what is left there is nobody's beginning
    assert all(map(same, answers(core, asked), alone))


def test_a_request_cancelled_in_the_middle_of_a_chunk_gives_its_state_back() -> None:
    core = core_of(max_running=2)
    core._pace = RandomPace(Random(1), 0.0)  # pauses wherever a pass can
    core._pace._pauses = 1.0
    expected = answers(core, [request(ids_of(3, 200), "none")])
    for _ in range(5):
        job = core.add(request(ids_of(4, 500), "none"))
        for _ in range(3):
            core.step()
        core.cancel(job)
    assert answers(core, [request(ids_of(3, 200), "none")]) == expected


@pytest.mark.skipif(is_piped(), reason="the runner's model is in another process")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_batch_that_fails_changes_no_state(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sequences are tried one by one, each from the state before the step that failed."""
    asked = [request(ids_of(n, 80), "none") for n in range(3)]
    expected = answers(core_of(family), asked)
    core = core_of(family)
    head = core.model.hf.lm_head
    real, failed = head.forward, []

    def fail_for_several(hidden: torch.Tensor) -> torch.Tensor:
        if hidden.shape[0] > 1:
            failed.append(hidden.shape)
            raise RuntimeError("no batches")
        return real(hidden)

    monkeypatch.setattr(head, "forward", fail_for_several)
    assert all(map(same, answers(core, asked), expected))
    assert failed


def test_what_a_filter_keeps_is_read_with_a_fresh_state() -> None:
    """The answer is that to the kept tokens alone."""
    core, ids = core_of(), ids_of(5, 400)
    events = list(core.run_alone(request(ids)))
    kept = [p for low, high in report_of(events).selection or () for p in range(low, high)]
    assert 16 < len(kept) < 400
    filtered = [e.token_ids for e in events if isinstance(e, TextDelta)]
    alone = core.run_alone(request([ids[p] for p in kept], "none"))
    assert [e.token_ids for e in alone if isinstance(e, TextDelta)] == filtered


@pytest.mark.parametrize("family", FAMILIES)
def test_segments_begin_with_fresh_states(family: str) -> None:
    """The scores are those of passes over each segment alone, with the question behind it."""
    core, ids = core_of(family), ids_of(1, 900)
    model, layer, asked = core.model, core.config.filter_layer, ids[-6:]
    planned = core.planner.planned(request(ids, window=256, return_scores="exact"))
    assert planned.plan is not None
    plan = planned.plan.segments
    assert plan is not None
    assert len(plan.segments) > 3
    heads, sinks = model.shape.num_heads, []
    logits = torch.full((heads, len(asked), len(ids)), -torch.inf)
    for segment in plan.segments:
        text = [*ANCHOR, *ids[segment.start : segment.stop]]
        whole, units = [*text, *asked], 2 * layer + 1
        kv = model.new_memory(len(whole) * units).pass_kv(0, num_units=units, capacity=len(whole))
        tap = model.new_query_tap([layer], range(len(text), len(whole)))
        ends = FilterTap(layer=layer, queries=tap, num_tokens=len(whole))
        model.filter_chunk(whole, start=0, kv=kv, tap=ends)
        keys = kv.keys(layer, len(text)).repeat_interleave(heads // model.shape.num_kv_heads, 0)
        seen = tap.of(layer) @ keys.transpose(1, 2) * tap.scales[layer]
        sinks.append(seen[:, :, : len(ANCHOR)].logsumexp(-1))
        logits[:, :, segment.start : segment.stop] = seen[:, :, len(ANCHOR) :]
    total = torch.logaddexp(logits.logsumexp(-1), torch.stack(sinks).mean(0))
    for segment in plan.segments:  # the best of each row alone are remembered
        part = logits[:, :, segment.start : segment.stop]
        part[part < part.topk(MOST_KEPT, dim=-1).values[:, :, -1:]] = -torch.inf
    expected = (logits - total[:, :, None]).exp().amax(dim=(0, 1))
    scores = report_of(list(core.run_alone(planned))).scores
    assert scores is not None
    found = torch.tensor(np.frombuffer(b64decode(scores.tokens), dtype="<f4"))
    torch.testing.assert_close(found, expected, rtol=2e-3, atol=1e-6)


def test_nothing_is_taken_from_a_cache() -> None:
    """A state is that behind the last token, and a shorter beginning has none."""
    core, ids = core_of(cache_memory=0.5), ids_of(1, 1200)
    for method in ("sieve", "none", "sieve", "none"):
        report = report_of(list(core.run_alone(request(ids, method))))
        assert not report.cached_tokens
    assert not core.cache_counts.hits


def test_a_fallback_waits_without_a_state() -> None:
    """A sequence that waits for more memory gives its place to others."""
    core = core_of(max_running=2, kv_memory_bytes=10_000 * UNIT)
    asked = [request(ids_of(n, 800), fallback=True) for n in range(5)]
    expected = [answers(core, [one])[0] for one in asked]
    assert all(map(same, answers(core, asked), expected))


def test_layers_without_attention_take_no_kv_memory() -> None:
    """Two of four layers have keys, and one of the three that the filter pass runs below."""
    core = core_of()
    assert core.model.shape.kv_layers == (1, 3)
    for method, units in (("none", 4 * (300 + 12)), ("sieve", 3 * 300)):
        *_, last = core.run_alone(request(ids_of(1, 300), method))
        assert isinstance(last, Finished)
        assert last.peak_kv_bytes == units * UNIT
    assert core.longest_sequence == min(100_000 // 4, 4096)


def test_memory_is_set_aside_for_as_many_states_as_may_run() -> None:
    model = model_of("lfm2")
    assert model.states.layers == {0, 2}
    assert model.states.num_bytes == 2 * 64 * 3 * 4
    places = model.new_states(2)
    one, two = places.take(), places.take()
    assert {one.slot, two.slot} == {0, 1}
    one.give_back()
    assert places.take().slot == one.slot


def assembled(family: str = "lfm2", **settings: Any) -> Core:
    loaded = LoadedModel(
        model=model_of(family), tokenizer=NoText(), eos_ids=frozenset(), source="x", name="x"
    )
    return assemble(loaded, EngineConfig(calibrate="off", **settings))


def _states_of(count: int) -> int:
    """Bytes of the states of so many requests, and of their copies in a decode step."""
    return count * 2 * 1536


def _beside(model: Core, kv_bytes: int, count: int) -> int:
    return planned_weights(model.model, model.config).device + kv_bytes + _states_of(count)


def test_as_many_requests_run_as_there_is_memory_for_their_states(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The states of 256 requests were never compared with a CPU's memory."""
    plain = assembled(kv_memory_bytes=1 << 26)
    assert plain.config.max_running == 256
    room = _beside(plain, 1 << 26, 10) + 100
    host = HostMemory(room + 1000, room, is_kv_default=False)
    small = assembled(kv_memory_bytes=1 << 26, host_memory=host)
    assert (small.config.max_running, small.config.kv_memory_bytes) == (10, 1 << 26)
    assert "max_running=10 instead of 256" in caplog.text
    assert "state of 1536 bytes" in caplog.text
    large = HostMemory(1 << 33, 1 << 33, is_kv_default=False)
    assert assembled(kv_memory_bytes=1 << 26, host_memory=large).config.max_running == 256


def test_a_default_of_kv_memory_makes_room_for_states(caplog: pytest.LogCaptureFixture) -> None:
    """A default that fills the memory would leave nothing for them."""
    plain = assembled(kv_memory_bytes=1 << 28)
    room = _beside(plain, 1 << 28, 0)
    host = HostMemory(room, room, is_kv_default=True)
    core = assembled(kv_memory_bytes=1 << 28, host_memory=host)
    assert core.config.max_running == 256
    assert core.config.kv_memory_bytes == (1 << 28) - (1 << 20)
    assert "kv_memory=267386880 instead of 268435456" in caplog.text
    chosen = assembled(kv_memory_bytes=1 << 28, host_memory=host, max_running=1024)
    assert chosen.config.max_running == 1024
    assert chosen.config.kv_memory_bytes == (1 << 28) - (3 << 20)


@pytest.mark.parametrize("is_kv_default", [False, True])
def test_states_that_were_chosen_and_do_not_fit_are_refused(is_kv_default: bool) -> None:
    plain = assembled(kv_memory_bytes=1 << 26)
    room = _beside(plain, 1 << 26, 10)
    host = HostMemory(room, room, is_kv_default=is_kv_default)
    with pytest.raises(
        ConfigError,
        match=r"max_running=11: their recurrent states are 33792 bytes, 1536 for each request and "
        rf"as much for its decode steps; with \d+ bytes of weights and {1 << 26} of KV memory more "
        rf"than the {room} bytes",
    ):
        assembled(kv_memory_bytes=1 << 26, host_memory=host, max_running=11)


def test_the_default_filter_layer_has_attention() -> None:
    assert assembled().config.filter_layer == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"filter_layer": 2}, r"filter_layer=2: this layer has no attention; .*: 1 and 3"),
        ({"filter_layer": 0}, r"filter_layer=0: this layer has no attention; .*: 1$"),
        ({"filter_method": "snapkv"}, r"filter=snapkv: 2 of the model's layers have no attention"),
        ({"cuda_graphs": "on"}, r"cuda_graphs=on: "),
        ({"cpu_step": "on"}, r"cpu_step=on: .*not for models of type lfm2"),
    ],
)
def test_options_that_such_models_do_not_have(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        assembled(**settings)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"method": "snapkv"}, r"filter.method=snapkv: not for this model: 2 of its layers"),
        ({"return_attention": True}, r"filter.return_attention=true: not for this model"),
    ],
)
def test_requests_that_such_models_do_not_answer(params: dict[str, Any], message: str) -> None:
    core, asked = core_of(), request(ids_of(1, 300))
    with pytest.raises(RequestError, match=message):
        core.add(replace(asked, filter=replace(asked.filter, **params)))


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"layer": 2}, r"filter.layer=2: this layer has no attention; .*: 1 and 3"),
        ({"heads": ((2, 0),)}, r"filter.heads: layer 2 has no attention; .*: 1 and 3"),
    ],
)
def test_layers_of_a_request_have_attention(params: dict[str, Any], message: str) -> None:
    core, asked = core_of(), request(ids_of(1, 300))
    with pytest.raises(RequestError, match=message):
        core.planner.check_layer_sees(replace(asked.filter, **params), (), 300)


def test_adapters_ranks_and_layers_on_the_host_are_refused(tmp_path: Any) -> None:
    model = model_of("lfm2")
    with pytest.raises(AdapterError, match="layers keep a recurrent state"):
        load_adapter("style", tmp_path, model, base_of(model), 1 << 24)
    with pytest.raises(ConfigError, match=r"tensor_parallel=2: .*must be 1"):
        check_divisible(model.config, 2)
    with pytest.raises(ConfigError, match=r"offload_layers=2: .*must be 0"):
        place(families.build("lfm2"), torch.device("cpu"), 2)
