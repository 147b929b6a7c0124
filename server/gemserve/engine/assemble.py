"""From settings to a pipeline ready to run requests."""

from __future__ import annotations

from pathlib import Path

from gemserve.config import EngineConfig, ModelConfig, read_filter_layer, resolve_engine
from gemserve.engine.passes import Pipeline
from gemserve.model.loader import Loaded, load


def build_pipeline(model: ModelConfig, engine: EngineConfig) -> Pipeline:
    """Load the model and resolve what is automatic. Raises `ModelError` or `ConfigError`."""
    return assemble(load(model), engine)


def assemble(loaded: Loaded, engine: EngineConfig) -> Pipeline:
    """A pipeline over a loaded model."""
    causal = loaded.model
    directory = Path(loaded.source)
    resolved = resolve_engine(
        engine,
        num_layers=causal.num_layers,
        hidden_size=causal.config.hidden_size,
        vocab_size=causal.vocab_size,
        context_tokens=causal.context_tokens,
        model_filter_layer=read_filter_layer(directory),
    )
    return Pipeline(
        model=causal,
        tokenizer=loaded.tokenizer,
        config=resolved,
        eos_ids=loaded.eos_ids,
    )
