"""From settings to an engine core ready to run requests."""

from __future__ import annotations

from gemserve.calibration import read_filter_layer
from gemserve.config import EngineConfig, ModelConfig, resolve_engine
from gemserve.engine.core import Core
from gemserve.errors import ConfigError
from gemserve.filtering.table import ADAPTIVE, SELECTORS
from gemserve.model.causal import CausalModel
from gemserve.model.loader import Loaded, load


def build_core(model: ModelConfig, engine: EngineConfig) -> Core:
    """Load the model and resolve what is automatic. Raises `ModelError` or `ConfigError`."""
    return assemble(load(model), engine)


def assemble(loaded: Loaded, engine: EngineConfig) -> Core:
    """An engine core over a loaded model."""
    causal = loaded.model
    calibrated = None
    if engine.filter_layer is None:
        calibrated = read_filter_layer(loaded.source, causal.num_layers)
    resolved = resolve_engine(
        engine,
        num_layers=causal.num_layers,
        hidden_size=causal.config.hidden_size,
        vocab_size=causal.vocab_size,
        context_tokens=causal.context_tokens,
        model_filter_layer=calibrated,
    )
    _check_filter_layer(causal, resolved)
    if resolved.filter_keep == "auto" and resolved.filter_method not in ADAPTIVE:
        raise ConfigError(f"filter_keep=auto: method {resolved.filter_method} does not have it")
    return Core(
        model=causal,
        tokenizer=loaded.tokenizer,
        config=resolved,
        eos_ids=loaded.eos_ids,
    )


def _check_filter_layer(model: CausalModel, config: EngineConfig) -> None:
    """Refuse a filter layer that cannot see the start of the prompts it would filter."""
    layer, limit = config.filter_layer, config.max_prompt_tokens
    assert layer is not None
    assert limit is not None
    window = model.window_of(layer)
    if config.filter_method not in SELECTORS or window is None or window >= limit:
        return
    full = [i for i in range(model.num_layers) if model.window_of(i) is None]
    choices = f"choose --filter-layer among {full}" if full else "no layer sees everything"
    raise ConfigError(
        f"filter_layer={layer}: this layer sees only the last {window} tokens; {choices}, set "
        f"--max-prompt-tokens to at most {window}, or serve with --filter none"
    )
