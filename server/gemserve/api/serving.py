"""What the application serves: an engine over a core, a request builder, and adapters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gemserve.adapters.adapter_store import AdapterStore
from gemserve.api.requests.request_builder import RequestBuilder
from gemserve.config import EngineConfig, ServerConfig
from gemserve.engine.core import Core
from gemserve.engine.watchdog import Watchdog
from gemserve.engine.worker import Engine, IdleWork
from gemserve.errors import AdapterBusy, AdapterError, ConfigError
from gemserve.model.passes.causal_model import CausalModel
from gemserve_kernels import Backend


@dataclass(frozen=True, slots=True, kw_only=True)
class Serving:
    """What the application serves. `model_type`: the architecture's name, such as "llama".

    `also_named`: a second name by which requests may call the model, such as its path.
    `core`: of the engine, whose thread alone may change it; None in tests without a model.
    `engine_config` gives the settings as they are now.
    """

    engine: Engine
    builder: RequestBuilder
    adapters: AdapterStore
    model_name: str
    backend: Backend
    config: ServerConfig
    watchdog: Watchdog | None = None
    engine_config: Callable[[], EngineConfig] = EngineConfig
    model_type: str = "unknown"
    also_named: str | None = None
    core: Core | None = None


def build_serving(
    core: Core,
    *,
    model_name: str,
    config: ServerConfig,
    also_named: str | None = None,
    idle_work: IdleWork | None = None,
) -> Serving:
    """Load the adapters and start the engine's worker. The application stops it when it ends.

    `idle_work`: what the worker does while there are no requests. Raises `ConfigError` for an
    adapter that cannot be loaded.
    """
    adapters = _open_adapters(core.model, config)
    vocabulary = core.tokenizer.get_vocab()
    builder = RequestBuilder(
        tokenizer=core.tokenizer,
        grammars=core.grammars,
        context_tokens=core.model.context_tokens,
        vocab_size=core.model.vocab_size,
        longest_token_chars=max(map(len, vocabulary)),
        current_planner=lambda: core.planner,
        unscaled_tokens=core.model.unscaled_tokens,
    )
    engine = Engine(core, max_queue=core.config.max_queue, idle_work=idle_work)
    return Serving(
        engine=engine,
        builder=builder,
        adapters=adapters,
        backend=core.model.backend,
        model_name=model_name,
        config=config,
        watchdog=watchdog_of(engine, config),
        engine_config=lambda: core.config,
        model_type=core.model.config.model_type,
        also_named=also_named,
        core=core,
    )


def watchdog_of(engine: Engine, config: ServerConfig) -> Watchdog | None:
    """The watchdog that the settings want, if any."""
    if not config.watchdog_s:
        return None
    return Watchdog(engine, config.watchdog_s)


def _open_adapters(model: CausalModel, config: ServerConfig) -> AdapterStore:
    root = None if config.adapter_dir is None else Path(config.adapter_dir)
    store = AdapterStore(model, root, config.adapter_memory_bytes)
    for name, path in config.adapters:
        try:
            store.load(name, path)
        except (AdapterError, AdapterBusy) as error:
            raise ConfigError(str(error)) from error
    return store
