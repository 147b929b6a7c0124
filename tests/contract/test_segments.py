"""Segments with a real model: replies of all protocols and metrics say what was read and found."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from gemserve.api.serving import build_serving
from gemserve.calibration.files import Calibration
from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve.engine.build import build_core
from gemserve_client import GemserveClient
from tests.fakes import live_server

FILLER = "The river runs past the houses, they say; nobody counts them. "
DOCUMENT = "\n\n".join(f"Page {i}. {FILLER * 8}" for i in range(16))
SEGMENT = 256
FILTER: dict[str, Any] = {"window": SEGMENT, "keep": 256, "fallback": False}


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    config = EngineConfig(kv_memory_bytes=1 << 28, filter_min_tokens=256, filter_layer=2)
    core = build_core(ModelConfig(device="cpu", dtype="float32"), config)
    with live_server(build_serving(core, model_name="builtin", config=ServerConfig())) as address:
        yield address


def body_of(path: str, text: str) -> dict[str, Any]:
    message = {"role": "user", "content": text}
    fields: dict[str, Any] = {
        "/v1/completions": {"prompt": text, "max_tokens": 4},
        "/v1/chat/completions": {"messages": [message], "max_tokens": 4},
        "/v1/filter": {"messages": [message]},
        "/v1/responses": {"input": text, "max_output_tokens": 16},
        "/v1/messages": {"messages": [message], "max_tokens": 4},
        "/api/chat": {"messages": [message], "stream": False, "options": {"num_predict": 4}},
        "/api/generate": {"prompt": text, "stream": False, "options": {"num_predict": 4}},
    }
    return {"model": "builtin", "filter": FILTER} | fields[path]


PATHS = (
    *("/v1/chat/completions", "/v1/completions", "/v1/filter", "/v1/responses", "/v1/messages"),
    *("/api/chat", "/api/generate"),
)


def counted(url: str) -> tuple[float, float]:
    """Segments read and found, by the metrics."""
    lines = httpx.get(f"{url}/metrics").text.splitlines()
    found = dict(line.rsplit(" ", 1) for line in lines if line.startswith("gemserve_windows_total"))
    read, cache = (
        float(found[f'gemserve_windows_total{{source="{source}"}}']) for source in ("read", "cache")
    )
    return read, cache


@pytest.mark.parametrize("path", PATHS)
def test_every_reply_reports_segments(url: str, path: str) -> None:
    """Each document is new to the server, and the second question finds its segments."""
    document = DOCUMENT.replace("Page", f"Page of {path}")
    reports = []
    for question in ("Who counts the houses?", "What runs past the houses?"):
        before = counted(url)
        body = body_of(path, f"{document}\n\n{question}")
        reply = httpx.post(f"{url}{path}", json=body, timeout=100)
        assert reply.status_code == 200, reply.text
        report = reply.json()["filter"]
        assert json.loads(reply.headers["x-gemserve-filter"])["windows"] == report["windows"]
        after = counted(url)
        found = report["cached_windows"]
        assert (after[0] - before[0], after[1] - before[1]) == (report["windows"] - found, found)
        reports.append(report)
    first, second = reports
    assert first["window"] == second["window"] == SEGMENT
    assert first["windows"] > first["prompt_tokens"] / SEGMENT
    assert first["cached_windows"] == first["cached_tokens"] == 0
    # the last segment has what stands before the question, too
    assert first["windows"] - 2 <= second["cached_windows"] <= second["windows"]
    assert second["cached_tokens"] > 0.8 * second["prompt_tokens"]


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions"])
def test_a_stream_s_first_chunk_reports_segments(url: str, path: str) -> None:
    body = body_of(path, f"{DOCUMENT}\n\nWho counts the houses?") | {"stream": True}
    reply = httpx.post(f"{url}{path}", json=body, timeout=100)
    first = json.loads(reply.text.splitlines()[0].removeprefix("data: "))
    assert first["filter"]["window"] == SEGMENT
    assert 0 <= first["filter"]["cached_windows"] <= first["filter"]["windows"]


@pytest.mark.parametrize("window", ["auto", None])
def test_the_server_s_segments_are_the_calibration_s(url: str, window: Any) -> None:
    body = body_of("/v1/filter", f"{DOCUMENT}\n\nWho counts the houses?")
    body["filter"] = FILTER | {"window": window}
    report = httpx.post(f"{url}/v1/filter", json=body, timeout=100).json()["filter"]
    assert report["window"] == Calibration.USUAL_SEGMENT


def test_one_pass_reports_none(url: str) -> None:
    before = counted(url)
    body = body_of("/v1/filter", f"{DOCUMENT}\n\nWho counts the houses?")
    body["filter"] = FILTER | {"window": "off"}
    report = httpx.post(f"{url}/v1/filter", json=body, timeout=100).json()["filter"]
    assert report["applied"]
    assert [report[name] for name in ("window", "windows", "cached_windows")] == [None] * 3
    assert counted(url) == before


def test_the_client_has_the_report(url: str) -> None:
    text = f"{DOCUMENT}\n\nWho counts the houses?"
    with GemserveClient(base_url=url, max_retries=0, timeout=100) as client:
        kept = client.filter(
            model="builtin",
            messages=[{"role": "user", "content": text}],
            filter={"window": SEGMENT, "keep": 256, "fallback": False},
        )
        assert kept.filter.window == SEGMENT
        assert kept.filter.windows is not None
        assert kept.filter.cached_windows is not None
        assert kept.filter.windows >= kept.filter.cached_windows
