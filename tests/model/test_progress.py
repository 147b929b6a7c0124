"""How much of a prompt is read: what the core says while it reads it."""

from __future__ import annotations

import pytest

from gemserve.cli.progress_line import ProgressLine, text_of
from gemserve.config import EngineConfig
from gemserve.contract.events import Filtered
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.core import Core
from gemserve.engine.sequence.progress import Progress
from gemserve.filtering.sieve import Sieve
from gemserve.model.passes.causal_model import CausalModel
from tests import models
from tests.cores import core_over
from tests.model.test_selection import NoText

IDS = [3 + (7 * i) % 4000 for i in range(1500)]


def core_of(**settings: object) -> Core:
    config = EngineConfig(
        filter_layer=2,
        filter_min_tokens=0,
        kv_memory_bytes=32 << 20,
        min_chunk_tokens=64,
        max_chunk_tokens=128,
        step_target_s=0.001,
        **settings,  # type: ignore[arg-type]
    )
    return core_over(CausalModel(models.build("llama")), NoText(), config, frozenset())


def request(method: str = "sieve", ids: list[int] = IDS) -> Request:
    return Request(
        request_id="r",
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=3, temperature=0, ignore_eos=True),
        filter=FilterParams(method=method, keep=400),  # type: ignore[arg-type]
        question=((len(ids) - 6, len(ids)),),
    )


def progress_of(core: Core, asked: Request) -> list[Progress]:
    told: list[Progress] = []
    list(core.run_alone(asked, told.append))
    return told


def test_tokens_grow_to_their_total_in_each_phase() -> None:
    told: list[Progress] = []
    events = core_of().run_alone(request(), told.append)
    (kept,) = (event.report.kept_tokens for event in events if isinstance(event, Filtered))
    assert 400 - Sieve().passage_limit(400) < kept <= 400
    phases = [p.phase for p in told]
    assert phases == sorted(phases)  # "filter", then "prefill"
    for phase, total in (("filter", len(IDS)), ("prefill", kept)):
        tokens = [p.tokens for p in told if p.phase == phase]
        assert len(tokens) >= 3
        assert tokens == sorted(tokens)
        assert 0.8 * total < tokens[-1] <= total
        assert {p.total for p in told if p.phase == phase} == {total}


def test_the_estimate_counts_both_passes_and_falls_to_nothing() -> None:
    core = core_of()
    progress_of(core, request())  # measures how fast a pass is
    told = progress_of(core, request(ids=IDS[::-1]))
    estimates = [p.eta_s for p in told]
    assert None not in estimates
    left = [e for e in estimates if e is not None]
    assert min(left) >= 0
    assert left[-1] < left[0] / 3


@pytest.mark.parametrize("method", ["none", "snapkv", "position"])
def test_methods_without_a_filter_pass_only_prefill(method: str) -> None:
    told = progress_of(core_of(), request(method))
    assert {p.phase for p in told} == {"prefill"}
    assert {p.total for p in told} == {400 if method == "position" else len(IDS)}


def test_what_the_cache_has_counts_as_read() -> None:
    core = core_of()
    progress_of(core, request())
    told = progress_of(core, request(ids=[*IDS[:-6], 9, 8, 7, 6, 5, 4]))
    filtering = [p for p in told if p.phase == "filter"]
    assert all(p.cached > 1000 and p.tokens >= p.cached for p in filtering)


def test_a_request_that_waits_is_in_the_queue() -> None:
    core = core_of(max_running=1)
    first, second = core.add(request()), core.add(request(ids=IDS[::-1]))
    core.step()
    progress = core.progress(second)
    assert progress is not None
    assert (progress.phase, progress.tokens, progress.total) == ("queue", 0, len(IDS))
    assert progress.eta_s is None
    core.cancel(first)
    while not any(isinstance(event, Filtered) for _, event in core.step()):
        progress = core.progress(second)
        assert progress is not None
        assert progress.phase == "filter"
    core.cancel(second)
    assert core.progress(second) is None


def test_a_pipe_gets_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    line = ProgressLine()
    line.show(Progress(phase="filter", tokens=5, total=10))
    line.clear()
    assert capsys.readouterr().err == ""


def test_a_terminal_gets_one_line_that_goes_away(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    line = ProgressLine()
    progress = Progress(phase="filter", tokens=5000, total=10000, eta_s=12.4)
    line.show(progress)
    line.show(progress)  # too soon
    line.clear()
    line.clear()
    text = "filtering: 5,000 of 10,000 tokens (50%), about 12 s left"
    assert text_of(progress) == text
    assert capsys.readouterr().err == f"\r\x1b[K{text}\r\x1b[K"
