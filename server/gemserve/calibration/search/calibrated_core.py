"""Builds a core with a calibrated filter: from a calibration file, or by probing the model.

A model without a calibration file gets a short calibration when it is first used. The file is kept
in the user's cache, under a hash of the model's weights.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tqdm import tqdm

from gemserve.calibration.files import Calibration, parse_calibration, place_for, write_calibration
from gemserve.calibration.search.choose_layer import SHORT, Effort, ReportProgress, calibrate
from gemserve.calibration.search.result import CalibrationResult
from gemserve.config import DEFAULT_METHOD, EngineConfig, ModelConfig
from gemserve.engine.build import (
    assemble,
    calibration_for,
    calibration_path,
    load_for,
    load_rank_0,
)
from gemserve.engine.core import Core, StepRunner
from gemserve.engine.reader import CoreWithReader, ReaderCore
from gemserve.engine.running.runner import Runner
from gemserve.errors import ConfigError, ModelError, shown
from gemserve.filtering.methods import METHODS, SERVED_METHODS
from gemserve.model.base_model import hash_norms, hash_weights
from gemserve.model.loading.loader import LoadedModel
from gemserve.model.passes.causal_model import CausalModel
from gemserve.prompting.reader_text import ReaderText

if TYPE_CHECKING:
    from gemserve.engine.ranks.ranks import Ranks

_EVERY_S = 10.0  # seconds between lines if there is no terminal


def build_calibrated_core(
    model: ModelConfig,
    engine: EngineConfig,
    calibrates: Callable[[], None] = lambda: None,
    loaded: LoadedModel | None = None,
    new_runner: Callable[..., StepRunner] = Runner,
) -> Core:
    """Build a core as `build_core` does, after a short calibration if it needs one.

    `calibrates` is called when that begins. `loaded`: the model, if it is loaded already.
    `new_runner`: of the model that answers, see `Core`.

    There is no calibration if the filter layer was given, if the method needs none, or with
    calibrate "off". Progress is printed on standard error. If the calibration fails, a warning is
    printed and the filter layer is guessed.
    """
    if engine.filter_method not in METHODS:
        raise ConfigError(
            f"filter_method={shown(engine.filter_method)}: must be one of "
            f"{', '.join(SERVED_METHODS)}"
        )
    if engine.calibrate == "later":
        raise ConfigError(
            "calibrate=later: only for gemserve serve with one engine; must be auto, off, or a file"
        )
    loaded = loaded or load_for(model, engine)
    calibration = None
    if needs_calibration(loaded, engine):
        calibrates()
        calibration = _calibrate_now(loaded, engine)
    if engine.reader is not None:
        with _named(engine.reader):
            reader = _build_reader(engine.reader, engine, calibrates)
        _warn_if_slow(reader, loaded, calibration_for(loaded, engine).layer)
        own, other = reader.tokenizer.backend_tokenizer, loaded.tokenizer.backend_tokenizer
        # the chat template may be another one: the reader sees what the model that answers sees
        translate = None if own.to_str() == other.to_str() else ReaderText(reader.tokenizer)
        new_core = partial(CoreWithReader, reader, translate)
        return assemble(loaded, engine, new_runner=new_runner, new_core=new_core)
    core = assemble(loaded, engine, calibration, new_runner)
    _warn_of_guess(core)
    return core


def build_ranked_core(
    engine: EngineConfig, ranks: Ranks, calibrates: Callable[[], None] = lambda: None
) -> Core:
    """A core over a model that several ranks have together; this process is rank 0.

    The model is not calibrated if it has no calibration file. A reader is rank 0's alone. Raises
    `ModelError` or `ConfigError`.
    """
    from gemserve.engine.ranks.ranked_runner import RankedRunner

    new_runner = partial(RankedRunner, ranks)
    return build_calibrated_core(ranks.model, engine, calibrates, load_rank_0(ranks), new_runner)


@contextmanager
def _named(reader: str) -> Iterator[None]:
    """Say of errors that they are about the reader."""
    try:
        yield
    except ConfigError as error:
        problems = (problem.replace("kv_memory", "reader_memory") for problem in error.problems)
        problems = (problem.replace("--kv-memory", "--reader-memory") for problem in problems)
        raise ConfigError(*(f"reader={reader}: {problem}" for problem in problems)) from error
    except ModelError as error:
        raise ModelError(f"reader={reader}: {error}") from error


def _build_reader(name: str, engine: EngineConfig, calibrates: Callable[[], None]) -> ReaderCore:
    """The core of a model that reads for another one, calibrated as any.

    Raises `ConfigError` or `ModelError`.
    """
    reads = METHODS[engine.filter_method].selector is not None
    settings = replace(
        engine,
        filter_method=engine.filter_method if reads else DEFAULT_METHOD,
        filter_layer=None,
        filter_keep=engine.filter_keep if reads else None,
        calibrate="off" if engine.calibrate == "off" else "auto",
        kv_memory_bytes=engine.reader_memory_bytes,
        cache_dir=None,
        filter_precision="model",
        offload_layers=0,
        host_memory=None,
        reader=None,
    )
    loaded = load_for(ModelConfig(model=name, device=engine.reader_device), settings)
    calibration = None
    if needs_calibration(loaded, settings):
        calibrates()
        calibration = _calibrate_now(loaded, settings)
    reader = assemble(loaded, settings, calibration, new_core=ReaderCore)
    assert isinstance(reader, ReaderCore)
    _warn_of_guess(reader)
    return reader


def _warn_if_slow(reader: Core, answering: LoadedModel, layer: int) -> None:
    """Say so if the reader's pass is no less work than that of the model that answers.

    `layer`: where that one would end.
    """
    segment_size = reader.calibration.USUAL_SEGMENT
    of_reader = reader.model.shape.filter_chunk(0, segment_size, reader.config.filter_layer)
    own = answering.model.shape.filter_chunk(0, segment_size, layer)
    if of_reader >= own:
        _say(
            f"warning: the reader's pass takes {of_reader / own:.1f} times the work of that of "
            f"{answering.name} itself: a smaller --reader, or none, is faster"
        )


def _warn_of_guess(core: Core) -> None:
    calibration = core.calibration
    if METHODS[core.config.filter_method].has_layer and not calibration.is_measured:
        _say(
            f"warning: filter layer {calibration.layer} is not calibrated ({calibration.source}); "
            "gemserve calibrate finds the layer and the heads that look at what is asked for"
        )


def needs_calibration(loaded: LoadedModel, engine: EngineConfig) -> bool:
    """Whether the settings want a calibration that there is no file of."""
    return (
        engine.calibrate in ("auto", "later")
        and engine.filter_layer is None
        and engine.reader is None
        and loaded.model.shard is None
        and engine.offload_layers == 0  # the guessed layer decided how many layers are on the host
        and METHODS[engine.filter_method].has_layer
        and calibration_path(loaded, engine) is None
    )


def run_calibration(
    loaded: LoadedModel, effort: Effort, *, kv_memory_bytes: int
) -> tuple[CalibrationResult, float]:
    """Calibrate a loaded model. Returns the result and seconds. Raises `ConfigError`."""
    started_s = time.monotonic()
    settings = EngineConfig(
        filter_method="none", calibrate="off", kv_memory_bytes=kv_memory_bytes, max_running=32
    )
    core = assemble(loaded, settings)
    limit = core.config.max_prompt_tokens
    if max(effort.lengths) > limit:
        raise ConfigError(f"lengths={max(effort.lengths)}: the longest prompt here is {limit}")
    with progress() as step:
        outcome = calibrate(core, effort, step)
    return outcome, time.monotonic() - started_s


def about_model(loaded: LoadedModel) -> dict[str, object]:
    """The part of a calibration file that says which model it is for."""
    return {
        "model": loaded.name,
        "weights": hash_weights(loaded.model.hf, rounded=True),
        "norms": hash_norms(loaded.model.hf),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
    }


def result_of(
    about: dict[str, object], outcome: CalibrationResult, effort: Effort, seconds: float
) -> dict[str, object]:
    """The content of a calibration file. `about`: see `about_model`."""
    return {
        **outcome.as_json(),
        **about,
        "lengths": list(effort.lengths),
        "seed": effort.seed,
        "seconds": round(seconds, 1),
    }


@contextmanager
def progress() -> Iterator[ReportProgress]:
    """A function that prints how far a calibration is, and how long its phase will still take.

    On one line of a terminal; elsewhere a line every ten seconds.
    """
    started_s = step_s = said_s = time.monotonic()
    phase_now = ""
    with tqdm(desc="calibrating", leave=False, disable=None) as bar:

        def step(phase: str, done: int, total: int) -> None:
            nonlocal started_s, step_s, said_s, phase_now
            now_s = time.monotonic()
            if phase != phase_now:
                phase_now, started_s = phase, step_s
                bar.set_description(f"calibrating: {phase}", refresh=False)
                bar.reset(total)
            bar.total = max(total, done)
            bar.update(done - bar.n)
            step_s = now_s
            if bar.disable and now_s - said_s >= _EVERY_S:
                left_s = (now_s - started_s) / done * max(0, total - done)
                _say(f"calibrating: {phase}, {done} of {total}, about {left_s:.0f} s left")
                said_s = now_s

        yield step


def _calibrate_now(loaded: LoadedModel, engine: EngineConfig) -> Calibration | None:
    """Calibrate a model that has no file. Returns None, with a warning, if the probes fail."""
    _say("this model is not calibrated yet: finding the heads that look at what is asked for")
    effort = short_effort(loaded.model, engine)
    try:
        outcome, seconds = run_calibration(loaded, effort, kv_memory_bytes=engine.kv_memory_bytes)
        if outcome.is_partial:  # whoever interrupted it wants no answers from a part of it
            raise KeyboardInterrupt
    except ConfigError as error:
        _say(f"warning: the calibration failed: {error}")
        return None
    result = result_of(about_model(loaded), outcome, effort, seconds)
    return stored_calibration(loaded.model, outcome, result, _say)


def short_effort(model: CausalModel, engine: EngineConfig) -> Effort:
    """How much the calibration reads of a model that is used for the first time."""
    shortest = min(engine.max_prompt_tokens or 1 << 30, model.context_tokens - 1)
    return replace(SHORT, lengths=tuple(min(length, shortest) for length in SHORT.lengths))


def stored_calibration(
    model: CausalModel,
    outcome: CalibrationResult,
    result: dict[str, object],
    say: Callable[[str], None],
) -> Calibration:
    """Store what was found for the next start, if that is possible, and say so.

    `result`: see `result_of`.
    """
    path = place_for("", str(result["weights"]))
    kept = f"kept in {path}"
    try:
        write_calibration(path, result)
    except ConfigError as error:  # a read-only folder; what was found is as good without a file
        kept = f"not kept for the next start: {error}"
    say(
        f"calibrated in {result['seconds']:.0f} s: filter layer {outcome.chosen.layer}, which "
        f"finds {outcome.describe()}; {kept}"
    )
    return parse_calibration(
        json.dumps(result), path, num_layers=model.num_layers, num_heads=model.shape.num_heads
    )


def _say(text: str) -> None:
    print(f"gemserve: {text}", file=sys.stderr, flush=True)
