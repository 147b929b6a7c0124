"""Errors that the server survives are counted: nothing is swallowed without a trace."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from gemserve.api.replies.choice import ReplyChoice
from gemserve.api.routes import warm_up
from gemserve.api.telemetry.internal_errors import InternalErrors
from tests.fakes import COMPLETIONS, Api, FakeCore, api_over, data_of, parse_metrics, wait_for_async

pytestmark = pytest.mark.anyio
DOCUMENT = {"name": "report", "text": "A report about a violin that is kept in the tower."}


def counted(values: dict[str, float]) -> dict[str, float]:
    prefix = 'internal_errors_total{where="'
    return {k[len(prefix) : -2]: v for k, v in values.items() if k.startswith(prefix)}


def fail(*_: object, **__: object) -> None:
    raise RuntimeError("a bug")


async def test_all_places_are_exported_from_the_start(api: Api) -> None:
    """Else an alert on an increase would miss the first error."""
    values = counted(await api.metrics())
    assert values == {"request": 0, "stream": 0, "document_warm_up": 0}


async def test_a_bug_while_a_request_is_parsed(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gemserve.api.routes.submission.parse_body", fail)
    assert (await api.post(COMPLETIONS)).status_code == 500
    assert counted(await api.metrics())["request"] == 1


async def test_a_stream_that_cannot_be_built(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplyChoice, "add", fail)
    reply = await api.post(COMPLETIONS, stream=True)
    assert "could not be built" in data_of(reply)[-1]["error"]["message"]
    assert counted(await api.metrics())["stream"] == 1


async def test_a_warm_up_that_nobody_can_follow(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """asyncio told of it only when the task was collected, and then without the API's logger."""
    monkeypatch.setattr(warm_up, "_follow", _follow_badly)
    assert (await api.client.post("/v1/documents", json=DOCUMENT)).status_code == 200
    await wait_for_async(lambda: "cannot be followed" in caplog.text)
    assert counted(await api.metrics())["document_warm_up"] == 1


async def _follow_badly(*_: object) -> None:
    raise RuntimeError("a bug")


async def test_a_request_that_is_refused_is_no_internal_error(api: Api) -> None:
    assert (await api.client.post(COMPLETIONS, content=b"{")).status_code == 400
    assert not any(counted(await api.metrics()).values())


def test_the_engine_s_own_counts_are_exported_too() -> None:
    engine: Any = SimpleNamespace(internal_errors={"decode_batch": 3})
    errors = InternalErrors(lambda: engine.internal_errors)
    errors.count("stream")
    registry = CollectorRegistry()
    registry.register(errors)
    values = parse_metrics(generate_latest(registry).decode())
    assert counted(values) == {"decode_batch": 3, "request": 0, "stream": 1, "document_warm_up": 0}


async def test_a_server_exports_those_of_its_core(tokenizer: Any) -> None:
    core = FakeCore()
    core.internal_errors = {"draw_batch": 2}
    async with api_over(core, tokenizer) as api:
        await api.assert_alive()  # the snapshot is of after a step
        assert counted(await api.metrics())["draw_batch"] == 2
