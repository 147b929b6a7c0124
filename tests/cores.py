"""Engine cores over small models, without a checkpoint."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gemserve.calibration.files import Calibration
from gemserve.config import DEFAULT_KEEP, EngineConfig, resolve_engine
from gemserve.engine.core import Core
from gemserve.filtering.methods import METHODS
from gemserve.model.cpu.cpu_step import with_cpu_step
from gemserve.model.passes.causal_model import CausalModel
from tests.pipe_runner import PipeRunner, is_piped


def core_over(
    model: CausalModel,
    tokenizer: Any,
    config: EngineConfig,
    eos_ids: frozenset[int],
    calibration: Calibration | None = None,
) -> Core:
    """A core with these settings; without a filter layer, layer 0 filters."""
    found = calibration or Calibration(layer=config.filter_layer or 0)
    resolved = resolve_engine(
        replace(config, filter_keep=config.filter_keep or DEFAULT_KEEP),
        found,
        is_adaptive=METHODS[config.filter_method].is_adaptive,
        num_layers=model.num_layers,
        context_tokens=model.context_tokens,
    )
    stepping = with_cpu_step(model, resolved.cpu_step)
    if is_piped():
        return Core(stepping, tokenizer, resolved, eos_ids, calibration, new_runner=PipeRunner)
    return Core(stepping, tokenizer, resolved, eos_ids, calibration)
