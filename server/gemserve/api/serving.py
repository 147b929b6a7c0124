"""Put an engine and a prompt builder over a pipeline."""

from __future__ import annotations

from gemserve.api.app import Serving
from gemserve.api.prompts import PromptBuilder
from gemserve.config import ServerConfig
from gemserve.engine.engine import Engine
from gemserve.engine.passes import Pipeline


def build_serving(pipeline: Pipeline, *, model_name: str, config: ServerConfig) -> Serving:
    """Start the engine's worker; the application stops it when it shuts down."""
    vocabulary = pipeline.tokenizer.get_vocab()
    prompts = PromptBuilder(
        tokenizer=pipeline.tokenizer,
        config=pipeline.config,
        context_tokens=pipeline.model.context_tokens,
        vocab_size=pipeline.model.vocab_size,
        longest_token_chars=max(map(len, vocabulary)),
        window_of=pipeline.model.window_of,
    )
    return Serving(
        engine=Engine(pipeline, max_queue=pipeline.config.max_queue),
        prompts=prompts,
        model_name=model_name,
        config=config,
    )
