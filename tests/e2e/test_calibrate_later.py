"""A server that calibrates its model while it serves it."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import httpx
import pytest

from gemserve.api.app import create_app
from gemserve.api.serving import build_serving
from gemserve.calibration.search import calibrated_core
from gemserve.calibration.search.choose_layer import Effort
from gemserve.calibration.search.idle_calibration import build_served_core
from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve.errors import ConfigError
from tests.fakes import parse_metrics
from tests.model.test_calibrate import copied, few

pytestmark = pytest.mark.anyio
CHAT = {
    "model": "builtin",
    "messages": [{"role": "user", "content": "The lamp is in the hall. " * 100 + "Where is it?"}],
    "max_tokens": 2,
}
QUERY = {"model": "builtin", "query": "the lamp", "documents": ["A lamp.", "The sea."]}


async def test_prompts_are_read_whole_until_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    little = Effort(lengths=(900,), samples=1, confirms=0, windows=0, answers=0, sees_all=False)
    monkeypatch.setattr(calibrated_core, "SHORT", little)
    engine = EngineConfig(filter_min_tokens=64, kv_memory_bytes=256 << 20, calibrate="later")
    model = ModelConfig(model=str(copied(tmp_path / "model")))
    core, idle_work = build_served_core(model, engine, lambda: None)
    assert idle_work is not None
    serving = build_serving(core, model_name="builtin", config=ServerConfig(), idle_work=idle_work)
    app = create_app(serving)
    transport = httpx.ASGITransport(app)
    try:
        async with httpx.AsyncClient(
            transport=transport, base_url="http://localhost", timeout=60
        ) as client:

            async def post(path: str, body: dict[str, Any]) -> httpx.Response:
                return await client.post(path, json=body)

            async def state() -> tuple[bool, float, dict[str, Any]]:
                info = (await client.get("/server_info")).json()
                metrics = parse_metrics((await client.get("/metrics")).text)
                return info["is_calibrating"], metrics["calibrating"], info["engine"]

            for keep in ({}, {"method": "sieve", "keep": 64}, {"method": "gemfilter", "keep": 64}):
                first = (await post("/v1/chat/completions", {**CHAT, "filter": keep})).json()
                assert first["filter"]["applied"] is False
                assert first["filter"]["reason"] == "not_calibrated"
                assert first["filter"]["kept_tokens"] == first["usage"]["prompt_tokens"]
            ranked = await post("/v1/rerank", QUERY)
            assert ranked.status_code == 503
            assert ranked.json()["error"]["code"] == "not_calibrated"
            assert int(ranked.headers["Retry-After"]) > 0
            document = {"text": "The lamp is in the hall. " * 100}
            stored = (await post("/v1/documents", document)).json()
            is_calibrating, gauge, before = await state()
            assert (is_calibrating, gauge) == (True, 1)

            until_s = time.monotonic() + 60
            while serving.engine.has_idle_work and time.monotonic() < until_s:
                await asyncio.sleep(0.05)
            reply = await client.get(f"/v1/documents/{stored['id']}")
            read = reply.json()  # nothing by the guessed layer
            assert (read["status"], read["cached_tokens"]) == ("ready", 0)
            is_calibrating, gauge, after = await state()
            assert (is_calibrating, gauge) == (False, 0)
            assert after["filter_layer"] == core.calibration.layer
            assert after["max_prompt_tokens"] > before["max_prompt_tokens"]
            asked = {**CHAT, "filter": {"keep": 64, "fallback": False}}
            last = (await post("/v1/chat/completions", asked)).json()
            assert last["filter"]["applied"] is True
            assert last["filter"]["layer"] == core.calibration.layer
            assert (await post("/v1/rerank", QUERY)).status_code == 200
    finally:
        serving.engine.stop()
    assert len(list((tmp_path / "cache").rglob("*.json"))) == 1


@pytest.mark.slow
async def test_libraries_are_refused_by_the_option_s_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their keys are those of calibrated heads."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    engine = EngineConfig(kv_memory_bytes=64 << 20, calibrate="later")
    model = ModelConfig(model=str(copied(tmp_path / "model")))
    core, idle_work = build_served_core(model, engine, lambda: None)
    config = ServerConfig(library_dir=str(tmp_path / "libraries"))
    serving = build_serving(core, model_name="builtin", config=config, idle_work=idle_work)
    try:
        with pytest.raises(ConfigError, match=r"library_dir=.*or use --calibrate auto"):
            create_app(serving)
    finally:
        serving.engine.stop()
