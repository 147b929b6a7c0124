"""What the application serves: an engine over a core, a request builder, and adapters."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from gemserve.adapters.store import AdapterStore
from gemserve.api.requests.request_builder import RequestBuilder
from gemserve.config import EngineConfig, ServerConfig
from gemserve.engine.core import Core
from gemserve.engine.watchdog import Watchdog
from gemserve.engine.worker import Engine
from gemserve.errors import AdapterBusy, AdapterError, ConfigError
from gemserve.library.vectors import VectorRequests, identity_of
from gemserve.model.base_model import hash_tokenizer, hash_weights
from gemserve.model.causal_model import CausalModel
from gemserve_kernels import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What the application serves. `model_type`: the architecture's name, such as "llama".

    `also_named`: a second name by which requests may call the model, such as its path.
    `vectors`: what libraries ask the engine for; None: there are none.
    """

    engine: Engine
    builder: RequestBuilder
    adapters: AdapterStore
    model_name: str
    backend: Backend
    config: ServerConfig
    watchdog: Watchdog | None = None
    engine_config: EngineConfig = field(default_factory=EngineConfig)
    model_type: str = "unknown"
    also_named: str | None = None
    vectors: VectorRequests | None = None


def build_serving(
    core: Core, *, model_name: str, config: ServerConfig, also_named: str | None = None
) -> Serving:
    """Load the adapters and start the engine's worker. The application stops it when it ends.

    Raises `ConfigError` for an adapter that cannot be loaded.
    """
    adapters = _open_adapters(core.model, config)
    max_prompt_tokens = core.config.max_prompt_tokens
    assert max_prompt_tokens is not None  # the core has resolved its configuration
    vocabulary = core.tokenizer.get_vocab()
    builder = RequestBuilder(
        tokenizer=core.tokenizer,
        grammars=core.grammars,
        max_prompt_tokens=max_prompt_tokens,
        context_tokens=core.model.context_tokens,
        vocab_size=core.model.vocab_size,
        longest_token_chars=max(map(len, vocabulary)),
        planner=core.planner,
        unscaled_tokens=core.model.unscaled_tokens,
    )
    engine = Engine(core, max_queue=core.config.max_queue)
    return Serving(
        engine=engine,
        builder=builder,
        adapters=adapters,
        backend=core.model.backend,
        model_name=model_name,
        config=config,
        watchdog=watchdog_of(engine, config),
        engine_config=core.config,
        model_type=core.model.config.model_type,
        also_named=also_named,
        vectors=None if config.library_dir is None else vectors_of(core, model_name),
    )


def vectors_of(core: Core, model_name: str) -> VectorRequests | None:
    """What libraries of this model ask the engine for; None: its heads are not calibrated."""
    if core.calibration.heads is None:
        return None
    identity = identity_of(
        core.planner,
        core.tokenizer,
        model=model_name,
        weights=hash_weights(core.model.hf, rounded=True),
        tokenizer_hash=hash_tokenizer(core.tokenizer),
    )
    return VectorRequests(planner=core.planner, identity=identity)


def watchdog_of(engine: Engine, config: ServerConfig) -> Watchdog | None:
    """The watchdog that the settings want, if any."""
    if not config.watchdog_s:
        return None
    return Watchdog(engine, config.watchdog_s, ends_process=config.watchdog_exit)


def _open_adapters(model: CausalModel, config: ServerConfig) -> AdapterStore:
    root = None if config.adapter_dir is None else Path(config.adapter_dir)
    store = AdapterStore(model, root, config.adapter_memory_bytes)
    for name, path in config.adapters:
        try:
            store.load(name, path)
        except (AdapterError, AdapterBusy) as error:
            raise ConfigError(str(error)) from error
    return store
