"""Put an engine and a prompt builder over a core."""

from __future__ import annotations

from gemserve.api.app import Serving
from gemserve.api.prompts import PromptBuilder
from gemserve.config import ServerConfig
from gemserve.engine.core import Core
from gemserve.engine.engine import Engine


def build_serving(core: Core, *, model_name: str, config: ServerConfig) -> Serving:
    """Start the engine's worker; the application stops it when it shuts down."""
    vocabulary = core.tokenizer.get_vocab()
    prompts = PromptBuilder(
        tokenizer=core.tokenizer,
        grammars=core.grammars,
        config=core.config,
        context_tokens=core.model.context_tokens,
        vocab_size=core.model.vocab_size,
        longest_token_chars=max(map(len, vocabulary)),
        windows=tuple(map(core.model.window_of, range(core.model.num_layers))),
    )
    return Serving(
        engine=Engine(core, max_queue=core.config.max_queue),
        prompts=prompts,
        model_name=model_name,
        config=config,
    )
