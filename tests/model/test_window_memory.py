"""Layers with a sliding window keep that window only, and nobody can tell by the answers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch

from gemserve.adapters.kinds import load_adapter
from gemserve.config import EngineConfig
from gemserve.contract.events import Event, Filtered, Finished, PromptScored, TextDelta
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.core import Core
from gemserve.engine.sequence.job import Job
from gemserve.engine.sequence.sequence import State
from gemserve.kv_layout import LOOK_TOKENS, KVLayout
from gemserve.model.base_model import base_of
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.kv import KVSpan
from tests import adapters
from tests.architectures import families
from tests.cores import core_over
from tests.model.test_selection import NoText

pytestmark = pytest.mark.usefixtures("use_compiled_step")
WINDOW = families.WINDOW
RECENT = WINDOW + LOOK_TOKENS + 32  # tokens that there is room for: the window moves on by 32
# below, at and just over the window, around the room for it, and many windows
LENGTHS = (1, 40, 71, 72, 73, 119, 120, 121, 152, 153, 400, 900)
NUM_DRAWN = 70  # the window moves on twice or three times meanwhile
FAMILIES = [
    "cohere2",
    "exaone4",
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gpt_oss",
    "mimo_v2_flash",
    "ministral",
    "mistral",
    "olmo3",
    "phi3",
    "qwen2",
    "smollm3",
]


def core_of(family: str, *, cache_memory: float = 0.0, cpu_step: Any = "auto", **more: Any) -> Core:
    settings: dict[str, Any] = {"min_chunk_tokens": 64, "max_chunk_tokens": 200, **more}
    model = CausalModel(built(family))
    config = EngineConfig(
        filter_min_tokens=0,
        kv_memory_bytes=60_000 * 8 * model.shape.unit_bytes // 2,
        cache_memory=cache_memory,
        cpu_step=cpu_step,
        filter_layer=next((i for i, w in enumerate(model.sliding_windows) if w is None), 0),
        **settings,
    )
    return core_over(model, NoText(), config, frozenset())


def built(family: str) -> Any:
    changes: dict[str, Any] = {"max_position_embeddings": 4096} if family != "phi3" else {}
    return families.build(family, **changes)


@contextmanager
def keeping_all(is_on: bool) -> Iterator[None]:
    """Engines keep all tokens in all layers meanwhile, as they did before."""
    with pytest.MonkeyPatch.context() as patch:
        if is_on:
            patch.setattr(KVLayout, "room", lambda self, capacity, *_: self.room_for_all(capacity))
        yield


def whole(ids: list[int], count: int = 5, **more: Any) -> Request:
    return Request(
        request_id="r",
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=count, temperature=0, ignore_eos=True),
        filter=FilterParams(method="none", keep=48, return_selection=True),
        **more,
    )


def ids_of(count: int, seed: int = 1) -> list[int]:
    rng = Random(seed)
    return [rng.randrange(6, families.VOCAB) for _ in range(count)]


def run(core: Core, asked: list[Request]) -> list[list[Event]]:
    """The events of requests that arrive at once."""
    events: dict[Job, list[Event]] = {core.add(one): [] for one in asked}
    while not core.is_idle:
        for job, event in core.step():
            events[job].append(event)
        core.check_integrity()
    return list(events.values())


def tokens_of(events: list[Event]) -> list[int]:
    end = events[-1]
    assert isinstance(end, Finished)
    assert end.reason == "length", end
    return [t for event in events if isinstance(event, TextDelta) for t in event.token_ids]


def cached_of(events: list[Event]) -> int:
    (report,) = (event.report for event in events if isinstance(event, Filtered))
    return report.cached_tokens


@torch.inference_mode()
def is_greedy(hf: Any, ids: list[int], drawn: list[int]) -> bool:
    """Is each token the one that transformers finds likeliest behind those before it?

    Two that are as likely may change places.
    """
    before, hf.config._attn_implementation = hf.config._attn_implementation, "eager"
    try:
        logits = hf(input_ids=torch.tensor([[*ids, *drawn]]), use_cache=False).logits[0]
    finally:
        hf.config._attn_implementation = before
    rows = logits[len(ids) - 1 : -1].float()
    of_drawn = rows.gather(1, torch.tensor(drawn)[:, None])[:, 0]
    return bool((rows.amax(dim=1) - of_drawn < 1e-4).all())


@pytest.mark.parametrize("cpu_step", ["off", "auto"])
@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_transformers(family: str, cpu_step: str) -> None:
    """All lengths at once, so that some windows move on in a step and others do not."""
    core = core_of(family, cpu_step=cpu_step)
    most = core.model.context_tokens - NUM_DRAWN
    prompts = [ids_of(length, length) for length in LENGTHS if length <= most]
    hf = built(family)
    for ids, events in zip(prompts, run(core, [whole(p, NUM_DRAWN) for p in prompts]), strict=True):
        assert is_greedy(hf, ids, tokens_of(events)), len(ids)


@pytest.mark.parametrize("chunk", [17, 72, 73, 300])
def test_chunks_may_end_anywhere(chunk: int) -> None:
    core = core_of("gemma3_text", min_chunk_tokens=chunk, max_chunk_tokens=chunk)
    prompts = [ids_of(length, length) for length in (300, 901)]
    hf = built("gemma3_text")
    for ids, events in zip(prompts, run(core, [whole(p, 9) for p in prompts]), strict=True):
        assert is_greedy(hf, ids, tokens_of(events)), len(ids)


def test_memory_is_that_of_windows() -> None:
    """What admission reserves, and what a reply tells of it."""
    core = core_of("gemma3_text")
    unit, capacity = core.model.shape.unit_bytes, 900 + 5
    ((*_, end),) = run(core, [whole(ids_of(900))])
    assert isinstance(end, Finished)
    expected = 2 * 2 * (capacity + RECENT) * unit  # two layers grow and two have windows
    assert (end.peak_kv_bytes, end.decode_kv_bytes) == (expected, expected)
    assert core.model.shape.kept_bytes(capacity) == expected


def test_more_sequences_fit() -> None:
    core = core_of("mistral", max_running=400)  # all four layers have windows
    jobs = [core.add(whole(ids_of(900), 3)) for _ in range(300)]
    core.step()
    num_running = sum(job.sequence.state is not State.WAITING for job in jobs)
    assert num_running == core.num_units // (8 * RECENT)
    assert num_running > 7 * (core.num_units // (8 * 903))


@pytest.mark.parametrize("family", ["gemma3_text", "mistral", "gpt_oss"])
def test_a_conversation_goes_on_from_its_last_turn(family: str) -> None:
    """Its answer has moved the window on, so what was saved at the prompt's end is needed."""
    warm, cold = core_of(family, cache_memory=0.5), core_of(family)
    history, found, ends = ids_of(700), [], [0]
    for turn in range(4):
        asked = whole(history, NUM_DRAWN)
        events, alone = list(warm.run_alone(asked)), list(cold.run_alone(asked))
        assert tokens_of(events) == tokens_of(alone)
        found.append(cached_of(events))
        ends.append(len(history))
        history = [*history, *tokens_of(events), *ids_of(300, turn)]
    assert found == ends[:-1]


@pytest.mark.parametrize("length", [20, 250, 600])
def test_another_question_goes_on_where_a_window_was_saved(length: int) -> None:
    """`length`: of the question, behind a document of 1,500 tokens."""
    warm, cold = core_of("gemma3_text", cache_memory=0.5), core_of("gemma3_text")
    document, found = ids_of(1500), []
    for turn in range(3):
        asked = whole(document + ids_of(length, turn), NUM_DRAWN)
        events, alone = list(warm.run_alone(asked)), list(cold.run_alone(asked))
        assert tokens_of(events) == tokens_of(alone)
        found.append(cached_of(events))
    # behind 600 tokens the document's end is not saved; 1,152 are sixteen windows
    assert found == [0, *[1500 if length <= 256 else 1152] * 2]


def test_questions_at_once_are_copied_from_one_that_is_answered() -> None:
    warm, cold = core_of("gemma3_text", cache_memory=0.5), core_of("gemma3_text")
    asked = [whole(ids_of(1000) + ids_of(20, n), NUM_DRAWN) for n in range(4)]
    for one, events in zip(asked, run(warm, asked), strict=True):
        assert tokens_of(events) == tokens_of(list(cold.run_alone(one)))
    counts = warm.cache_counts
    assert (counts.hits, counts.hit_tokens) == (3, 3000)


def test_a_window_that_cannot_move_ends_its_sequence_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The engine ended, because nothing caught an allocation that failed between two steps."""
    core = core_of("mistral", cpu_step="off")
    asked = [whole(ids_of(100 + 10 * i, i), 40) for i in range(3)]
    alone = [tokens_of(run(core, [one])[0]) for one in asked]
    move, moved = KVSpan._move_on, [0]

    def failing(self: KVSpan, recent: torch.Tensor, start: int, stop: int) -> int:
        is_step = recent.dim() == 4
        moved[0] += is_step
        if is_step and moved[0] == 2:  # in the midst of the first that moves
            raise torch.OutOfMemoryError("out of memory")
        return move(self, recent, start, stop)

    monkeypatch.setattr(KVSpan, "_move_on", failing)
    events = run(core, asked)
    ends = [each[-1] for each in events]
    (failed,) = [end for end in ends if isinstance(end, Finished) and end.reason == "error"]
    assert failed.error is not None
    assert "out of memory" in failed.error
    others = [
        (seen, one) for seen, one in zip(events, alone, strict=True) if seen[-1] is not failed
    ]
    assert [tokens_of(seen) for seen, _ in others] == [one for _, one in others]
    assert moved[0] > 4, "the others' windows have moved"
    assert core.kv_bytes_used == 0


def test_a_prompt_cut_off_leaves_what_is_right() -> None:
    """Cancelled in the middle of its answer, and in idle reading."""
    warm, cold = core_of("gemma3_text", cache_memory=0.5), core_of("gemma3_text")
    ids = ids_of(800)
    job = warm.add(whole(ids, NUM_DRAWN))
    while job.sequence.state is not State.DECODING or len(job.sequence.generated) < 50:
        warm.step()
    warm.cancel(job)
    one = whole(ids + ids_of(30, 2), 40)
    events = list(warm.run_alone(one))
    assert tokens_of(events) == tokens_of(list(cold.run_alone(one)))
    assert cached_of(events) == 800


KINDS: dict[str, dict[str, Any]] = {
    "filtered": {"method": "sieve"},
    "watched": {"method": "none", "return_attention": True},
    "filtered and watched": {"method": "sieve", "return_attention": True},
    "chosen by position": {"method": "position"},
}


@pytest.mark.parametrize("family", ["gemma3_text", "gpt_oss"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_else_a_request_wants_is_as_before(kind: str, family: str) -> None:
    """Bit for bit: what attends, attends to the same numbers in the same order."""
    one = replace(
        whole(ids_of(900), 60),
        filter=FilterParams(keep=400, return_selection=True, layer=1, **KINDS[kind]),
        question=((880, 900),),
        sampling=SamplingParams(max_tokens=60, temperature=0, ignore_eos=True, logprobs=2),
    )
    answers = []
    for is_before in (True, False):
        with keeping_all(is_before):
            answers.append([kept_of(event) for event in core_of(family).run_alone(one)])
    assert answers[0] == answers[1]


def kept_of(event: Event) -> Any:
    """What must be the same of an event."""
    if isinstance(event, TextDelta):
        return event.token_ids, event.logprobs
    if isinstance(event, Filtered):
        return event.report.selection
    assert not isinstance(event, Finished) or event.reason == "length", event
    return getattr(event, "attention", None)


def test_a_scored_prompt_is_as_before() -> None:
    scored = []
    for is_before in (True, False):
        with keeping_all(is_before):
            events = list(core_of("gemma3_text").run_alone(whole(ids_of(700), prompt_logprobs=2)))
        scored.append([event for event in events if isinstance(event, PromptScored)])
    assert len(scored[0]) == 1
    assert scored[0] == scored[1]


@pytest.mark.parametrize("kind", ["ntk", "activation"])
def test_adapters_are_as_before(kind: str, tmp_path: Path) -> None:
    answers = []
    for is_before in (True, False):
        with keeping_all(is_before):
            core = core_of("gemma3_text", cache_memory=0.0 if is_before else 0.5)
            folder = adapters.write(tmp_path / str(is_before), kind, core.model, 1)
            adapter = load_adapter("a", folder, core.model, base_of(core.model), 1 << 24)
            asked = [whole(ids_of(600) + ids_of(9, n), 40, adapter=adapter) for n in range(3)]
            asked.append(whole(ids_of(600), 40))
            answers.append([tokens_of(events) for events in run(core, asked)])
    assert answers[0] == answers[1]


def test_compaction_keeps_windows_in_their_places() -> None:
    """A sequence that moves in memory has its window where its table says."""
    core, hf = core_of("gemma3_text"), built("gemma3_text")
    units = core._layout.units(300 + 60, core._layout.room(300 + 60, 300))
    few = core.num_units // units
    prompts = [ids_of(300, n) for n in range(few)]
    jobs = [core.add(whole(ids, 60)) for ids in prompts]
    drawn: dict[Job, list[int]] = {job: [] for job in jobs}
    large: list[Job] = []
    while not core.is_idle:
        for job, event in core.step():
            if isinstance(event, TextDelta) and job in drawn:
                drawn[job] += event.token_ids
        if not large and all(len(job.sequence.generated) > 5 for job in jobs):
            for job in jobs[::2]:
                core.cancel(job)
            large = [core.add(whole(ids_of(1200), 4))]
        core.check_integrity()
    for job, ids in list(zip(jobs, prompts, strict=True))[1::2]:
        assert len(drawn[job]) == 60
        assert is_greedy(hf, ids, drawn[job])
