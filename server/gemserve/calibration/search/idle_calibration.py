"""Calibrates a model that is being served, while there are no requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

import torch

from gemserve.calibration.search.calibrated_core import (
    about_model,
    build_calibrated_core,
    needs_calibration,
    result_of,
    short_effort,
    stored_calibration,
)
from gemserve.calibration.search.choose_layer import calibrate
from gemserve.calibration.search.probes import prepare_texts
from gemserve.config import EngineConfig, ModelConfig
from gemserve.engine.build import assemble, calibration_for, load_for, settings_for
from gemserve.engine.core import Core
from gemserve.engine.running.passes import Pass, device_queue
from gemserve.errors import ConfigError
from gemserve.model.passes.attention import NO_PAUSES, Breaks

log = logging.getLogger("gemserve.calibration")
_PIECE_S = 0.02  # of a piece, if one layer of a chunk takes no longer


class IdleCalibration:
    """The short calibration of a core's model, in pieces that a request can wait for.

    When it has ended, it is stored, and the core filters by it. If it fails, a warning is logged,
    and the core goes on as it is. One thread calls all methods.
    """

    def __init__(self, core: Core, engine: EngineConfig, about: dict[str, object]) -> None:
        """`about`: see `about_model`."""
        self._core, self._engine, self._about = core, engine, about
        self._pass: Pass | None = None
        self._away_s = 0.0  # time between pieces
        self._left_s = time.monotonic()

    def run_piece(self) -> bool:
        """Go on for a moment. Returns True once the calibration has ended or failed."""
        self._away_s += time.monotonic() - self._left_s
        if self._pass is None:  # a pass belongs to the thread that makes it
            catch_up = device_queue(self._core.model.device)
            self._pass = Pass(self._calibrate, NO_PAUSES.piece, catch_up)
        try:
            # the calibration pauses within its own inference mode, which requests would see
            with torch.inference_mode():
                return self._pass.run(_PIECE_S)
        except Exception as error:
            log.warning(
                "the calibration failed, and prompts are read whole until the next start: %s",
                error,
                exc_info=None if isinstance(error, ConfigError) else error,
            )
            return True
        finally:
            self._left_s = time.monotonic()

    def abandon(self) -> None:
        """End it where it is. Nothing is stored. Idempotent."""
        if self._pass is not None:
            self._pass.abandon()

    def _calibrate(self, breaks: Breaks) -> None:
        core, model = self._core, self._core.model
        effort, started_s = short_effort(model, self._engine), self._clock()
        outcome = calibrate(core, effort, lambda *_: None, breaks, self._clock)
        result = result_of(self._about, outcome, effort, self._clock() - started_s)
        found = stored_calibration(model, outcome, result, log.info)
        core.filter_by(settings_for(model, self._engine, found), found)
        log.info("new prompts are filtered from now on: %s", found.describe())

    def _clock(self) -> float:
        """Seconds, without those between pieces."""
        return time.monotonic() - self._away_s


def build_served_core(
    model: ModelConfig, engine: EngineConfig, calibrates: Callable[[], None]
) -> tuple[Core, IdleCalibration | None]:
    """A core as `build_calibrated_core` makes it; with calibrate "later", and no file, what
    calibrates it while it is served.

    Raises `ConfigError` if the weights are made for a filter layer, which is not known then.
    """
    if engine.calibrate != "later":
        return build_calibrated_core(model, engine, calibrates), None
    loaded = load_for(model, engine)
    if not needs_calibration(loaded, engine):
        return build_calibrated_core(model, replace(engine, calibrate="auto"), loaded=loaded), None
    if engine.filter_precision == "fp8":
        raise ConfigError(
            "calibrate=later: not with filter_precision=fp8, which copies the layers up to the "
            "filter layer, and that is not known yet; use --calibrate auto"
        )
    guess = replace(calibration_for(loaded, engine), is_awaited=True)
    core, about = assemble(loaded, engine, guess), about_model(loaded)
    fitting = {name: getattr(core.config, name) for name in ("max_running", "kv_memory_bytes")}
    with suppress(OSError):  # raised again by the calibration, which tells it
        prepare_texts()  # seconds that nothing can pause
    return core, IdleCalibration(core, replace(engine, **fitting), about)
