"""A server over a random model with so short a context that no request takes long."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from gemserve.api.serving import build_serving
from gemserve.config import EngineConfig, ServerConfig
from gemserve.engine.core import Core
from gemserve.model.passes.causal_model import CausalModel
from tests import adapters, models
from tests.cores import core_over
from tests.fakes import live_server

MODEL, ADAPTER = "tiny", "prefix"
CONTEXT = 96


def tiny_core(tokenizer: Any, context: int = CONTEXT, **settings: Any) -> Core:
    model = models.build("llama")
    model.config.max_position_embeddings = context
    defaults: dict[str, Any] = {
        "kv_memory_bytes": 64 << 20,
        "filter_layer": 1,
        "filter_keep": 16,
        "filter_min_tokens": 24,
        "max_queue": 1000,
    }
    config = EngineConfig(**{**defaults, **settings})
    return core_over(
        model=CausalModel(model), tokenizer=tokenizer, config=config, eos_ids=frozenset({2})
    )


@contextmanager
def tiny_server(
    core: Core, folder: Path, keys: tuple[str, ...] = (), **server: Any
) -> Iterator[httpx.Client]:
    """A client of a server with one adapter, on a real socket."""
    adapters.write(folder / "adapters" / ADAPTER, "prefix", core.model)
    if keys:
        (folder / "keys").write_text("\n".join(keys))
        server |= {"api_key_file": str(folder / "keys"), "admin_key_file": str(folder / "keys")}
    config = ServerConfig(
        adapter_dir=str(folder / "adapters"), adapters=((ADAPTER, ADAPTER),), **server
    )
    serving = build_serving(core, model_name=MODEL, config=config)
    with (
        live_server(serving) as url,
        httpx.Client(base_url=url, timeout=120, trust_env=False) as client,
    ):
        yield client
