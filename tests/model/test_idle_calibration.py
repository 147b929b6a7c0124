"""`--calibrate later`: the model is calibrated while it is served."""

from __future__ import annotations

import gc
import json
import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gemserve.calibration.search import calibrated_core, idle_calibration
from gemserve.calibration.search.choose_layer import Effort
from gemserve.calibration.search.idle_calibration import IdleCalibration, build_served_core
from gemserve.calibration.search.observe import observe
from gemserve.config import EngineConfig, ModelConfig
from gemserve.contract.events import Filtered
from gemserve.contract.filter_options import FilterOptions, FilterParams
from gemserve.contract.prompt_parts import NO_BREAKS
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.core import Core
from gemserve.engine.running.passes import Pass
from gemserve.errors import ConfigError, NotCalibrated
from gemserve.llm import LLM
from gemserve.model.cpu.packed_linear import can_pack
from gemserve.model.loading.loader import LoadedModel
from gemserve.model.passes.attention import NO_PAUSES, Breaks
from gemserve.model.passes.causal_model import CausalModel
from gemserve.prompting.prompt import Prompt
from tests import models
from tests.architectures import families
from tests.cores import core_over
from tests.model.test_calibrate import copied, few
from tests.model.test_head_search import MEMORY
from tests.model.test_selection import NoText

LATER = EngineConfig(kv_memory_bytes=MEMORY, filter_min_tokens=64, calibrate="later")
LITTLE = Effort(lengths=(900,), samples=1, confirms=0, windows=0, answers=0, sees_all=False)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrated_core, "SHORT", LITTLE)
    few(monkeypatch)
    return tmp_path / "cache"


@pytest.fixture
def uncalibrated(tmp_path: Path) -> ModelConfig:
    return ModelConfig(model=str(copied(tmp_path / "model")))


def served(model: ModelConfig, engine: EngineConfig = LATER) -> tuple[Core, IdleCalibration]:
    core, idle = build_served_core(model, engine, lambda: None)
    assert idle is not None
    return core, idle


def ask(core: Core) -> FilterReport:
    """The filter's report of a question about some text."""
    ids = core.tokenizer.encode("The lamp stands on the shelf. " * 40 + "Where is the lamp?")
    asked = Request(
        request_id="r",
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=1),
        filter=core.planner.resolve(FilterOptions(keep=64, fallback=False)),
    )
    (report,) = [e.report for e in core.run_alone(asked) if isinstance(e, Filtered)]
    return report


def test_it_finds_what_a_calibration_before_the_start_finds(
    uncalibrated: ModelConfig, cache: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also with requests between its pieces, of which each layer of a chunk is one."""
    core, idle = served(uncalibrated)
    num_pieces, reasons = 1, [ask(core).reason]
    with caplog.at_level(logging.INFO, logger="gemserve.calibration"):
        while not idle.run_piece():
            num_pieces += 1
            if num_pieces % 4 == 0:  # a fast processor needs few pieces, which take a time
                reasons.append(ask(core).reason)
                core.check_integrity()
    assert len(reasons) > 1
    assert not torch.is_inference_mode_enabled()
    assert set(reasons) == {"not_calibrated"}
    assert ask(core).applied
    (written,) = cache.rglob("*.json")
    assert f"kept in {written}" in caplog.text
    assert "new prompts are filtered from now on: filter layer" in caplog.text
    found = core.calibration
    assert (found.source, found.is_measured, found.is_awaited) == (str(written), True, False)

    again, nothing = build_served_core(uncalibrated, LATER, lambda: None)
    assert nothing is None
    assert again.calibration == found
    assert replace(again.config, calibrate="later") == core.config
    by_later = json.loads(written.read_text())
    written.unlink()
    auto = replace(LATER, calibrate="auto")
    at_once = calibrated_core.build_calibrated_core(uncalibrated, auto)
    assert at_once.calibration == found
    by_auto = json.loads(written.read_text())
    times = {"seconds", "whole_s", "layers"}
    assert {k: v for k, v in by_later.items() if k not in times} == {
        k: v for k, v in by_auto.items() if k not in times
    }


def test_a_calibration_that_fails_leaves_a_warning_and_whole_prompts(
    uncalibrated: ModelConfig,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    few(monkeypatch, least_recall=1.1)
    core, idle = served(uncalibrated)
    while not idle.run_piece():
        pass
    assert "the calibration failed, and prompts are read whole until the next start" in caplog.text
    assert "the best heads find" in caplog.text
    assert "Traceback" not in caplog.text
    assert ask(core).reason == "not_calibrated"
    assert not list(cache.rglob("*.json"))


def test_what_nobody_expected_is_logged_with_its_stack(
    uncalibrated: ModelConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("CUDA out of memory")

    monkeypatch.setattr(idle_calibration, "calibrate", broken)
    core, idle = served(uncalibrated)
    assert idle.run_piece()
    assert "CUDA out of memory" in caplog.text
    assert "Traceback" in caplog.text
    assert ask(core).reason == "not_calibrated"


def test_an_abandoned_calibration_leaves_nothing(uncalibrated: ModelConfig, cache: Path) -> None:
    core, idle = served(uncalibrated)
    idle.abandon()
    assert not idle.run_piece()
    idle.abandon()
    idle.abandon()
    assert not torch.is_inference_mode_enabled()
    assert core.calibration.is_awaited
    assert not list(cache.rglob("*.json"))


def test_a_request_planned_meanwhile_is_read_whole(uncalibrated: ModelConfig) -> None:
    """Its options are from before the calibration, and name the guessed layer."""
    core, idle = served(uncalibrated)
    params = core.planner.resolve(FilterOptions(keep=64))
    while not idle.run_piece():
        pass
    ids = core.tokenizer.encode("The lamp stands on the shelf. " * 40)
    asked = Request(
        request_id="r", prompt_ids=ids, sampling=SamplingParams(max_tokens=1), filter=params
    )
    assert core.planner.plan(asked).reason == "not_calibrated"


def test_documents_are_ranked_afterwards(uncalibrated: ModelConfig) -> None:
    core, idle = served(uncalibrated)
    ids = core.tokenizer.encode("The lamp stands on the shelf.")

    def rank() -> Any:
        return core.planner.plan_documents(
            torch.tensor(ids).numpy(), [(0, len(ids))], NO_BREAKS, anchor=(1,), query=(5, 6)
        )

    with pytest.raises(NotCalibrated, match="--calibrate later"):
        rank()
    while not idle.run_piece():
        pass
    params, plan = rank()
    assert params.layer == plan.layer == core.calibration.layer


def test_the_weights_are_there_once(
    uncalibrated: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed weights are a copy, beside which those that were loaded must go."""
    if not can_pack(torch.device("cpu"), torch.bfloat16):
        pytest.skip("no weights are packed on this processor")
    kept: list[weakref.ref[torch.Tensor]] = []
    load: Callable[..., LoadedModel] = idle_calibration.load_for

    def load_once(*arguments: Any) -> LoadedModel:
        loaded = load(*arguments)
        weights = loaded.model.hf.named_parameters()
        kept.append(weakref.ref(next(w for name, w in weights if "q_proj" in name)))
        return loaded

    monkeypatch.setattr(idle_calibration, "load_for", load_once)
    core, idle = served(replace(uncalibrated, dtype="bfloat16"))
    assert not idle.run_piece()
    gc.collect()
    assert [reference() for reference in kept] == [None]
    assert core.calibration.is_awaited
    idle.abandon()


def test_what_needs_the_filter_layer_first_is_refused_by_name(
    uncalibrated: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match=r"calibrate=later: only for gemserve serve"):
        LLM(uncalibrated, LATER)
    monkeypatch.setattr("gemserve.model.passes.fp8.check_device", lambda _: None)
    with pytest.raises(ConfigError, match=r"calibrate=later: not with filter_precision=fp8"):
        build_served_core(uncalibrated, replace(LATER, filter_precision="fp8"), lambda: None)


@pytest.mark.parametrize(
    "changes",
    [{"filter_method": "none"}, {"filter_layer": 3}],
    ids=["no filter", "a layer is given"],
)
def test_what_needs_no_calibration_makes_none(
    uncalibrated: ModelConfig, changes: dict[str, Any]
) -> None:
    core, idle = build_served_core(uncalibrated, replace(LATER, **changes), lambda: None)
    assert idle is None
    assert not core.calibration.is_awaited


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "lfm2"])
def test_requests_between_pieces_change_no_observation(name: str) -> None:
    """Layers with a recurrent state and sliding windows have memory of their own for it."""
    model = models.build(name) if name == "llama" else families.build(name)
    core = core_over(
        CausalModel(model), NoText(), EngineConfig(kv_memory_bytes=MEMORY), frozenset()
    )
    ids = torch.randint(6, core.model.vocab_size, (700,))
    prompts = [Prompt(ids=ids[:stop].tolist(), protected=()) for stop in (650, 700)]
    rows = [[640], [10, 699]]

    def queries_of(breaks: Breaks) -> list[torch.Tensor]:
        seen = observe(core, prompts, rows, breaks=breaks)
        layers = (layer for evidence in seen for layer in evidence.layers.values())
        return [torch.cat([layer.queries.flatten(), layer.keys.flatten()]) for layer in layers]

    asked = Request(
        request_id="r",
        prompt_ids=ids[:100].tolist(),
        sampling=SamplingParams(max_tokens=2),
        filter=FilterParams(method="none", keep=100),
    )
    expected = queries_of(NO_PAUSES)
    found: list[torch.Tensor] = []
    reading = Pass(lambda breaks: found.extend(queries_of(breaks)), 1 << 20, lambda: None)
    num_pieces = 1
    with torch.inference_mode():
        while not reading.run(0.0):
            num_pieces += 1
            list(core.run_alone(asked))
    assert num_pieces > 3
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
