"""The API over the built-in model and a folder of libraries, without a socket."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx

from gemserve.api.app import create_app
from gemserve.api.serving import build_serving
from gemserve.calibration.search.calibrated_core import build_calibrated_core
from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve.engine.core import Core


def build_core() -> Core:
    """The built-in model, which filters from 256 tokens on."""
    return build_calibrated_core(
        ModelConfig(model="builtin"),
        EngineConfig(kv_memory_bytes=1 << 29, filter_min_tokens=256),
    )


@asynccontextmanager
async def serve_libraries(
    core: Core, folder: Path, **options: Any
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a server whose libraries are below `folder`; `options` are `ServerConfig`'s."""
    config = ServerConfig(library_dir=str(folder / "libraries"), **options)
    serving = build_serving(core, model_name="builtin", config=config)
    app = create_app(serving)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=transport, base_url="http://localhost", timeout=60) as client,
    ):
        yield client


async def make_library(client: httpx.AsyncClient, name: str) -> None:
    (await client.post("/v1/libraries", json={"name": name})).raise_for_status()


async def ask_of_ferry(
    client: httpx.AsyncClient, names: list[str], *, candidates: int
) -> httpx.Response:
    """A question of libraries of which texts say when the ferry leaves."""
    body = {
        "model": "builtin",
        "messages": [{"role": "user", "content": "When does the ferry to Malmo leave?"}],
        "max_tokens": 2,
        "filter": {"library": names, "candidates": candidates},
    }
    return await client.post("/v1/chat/completions", json=body)
