"""The log: one line for each reply, with the request's id and without anybody's text."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator

import pytest

from gemserve.cli.logs import set_up_logs
from tests.fakes import CHAT, FILTERED, Api, FakeCore

pytestmark = pytest.mark.anyio
LOGGERS = ("", "gemserve", "gemserve.loading", "uvicorn", "uvicorn.error")


@pytest.fixture
def loggers() -> Iterator[None]:
    """What is changed here is undone."""
    found = [logging.getLogger(name) for name in LOGGERS]
    before = [(log.level, list(log.handlers), log.propagate) for log in found]
    yield
    for log, (level, handlers, propagate) in zip(found, before, strict=True):
        log.handlers[:], log.propagate = handlers, propagate
        log.setLevel(level)


async def test_every_line_about_a_request_has_its_id(
    api: Api, core: FakeCore, loggers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set_up_logs("json") is None
    core.script = (FILTERED, "a", ValueError("boom"))
    await api.post(CHAT, headers={"X-Request-Id": "one"})
    await api.post(CHAT, headers={"X-Request-Id": "two"}, stream=True)
    await api.client.get("/v1/models/a%0Ab", headers={"X-Request-Id": "three"})
    lines = [json.loads(line) for line in capsys.readouterr().err.splitlines()]
    assert [line["request_id"] for line in lines] == ["one", "two", "three"]
    assert [line["status"] for line in lines] == [500, 200, 404]
    assert lines[0]["path"] == CHAT
    assert lines[2]["path"] == "/v1/models/a%0Ab"
    assert all(line["duration_ms"] >= 0 and line["logger"] == "gemserve.access" for line in lines)
    assert set(lines[0]) == {
        *("time", "level", "logger", "message", "request_id"),
        *("method", "path", "status", "duration_ms"),
    }


async def test_no_line_has_the_prompt(
    api: Api, loggers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logs("json")
    secret = "the lantern's code"
    for fields in ({}, {"temperature": 9}, {"stop": [secret] * 99}, {"stream": True}):
        await api.post(CHAT, messages=[{"role": "user", "content": secret}], **fields)
    log = capsys.readouterr().err
    assert len(log.splitlines()) == 4
    assert secret not in log


async def test_probes_are_not_logged_unless_they_fail(
    api: Api, loggers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prometheus and a load balancer ask every few seconds."""
    set_up_logs("text")
    for path in ("/health", "/ready", "/metrics"):
        await api.client.get(path)
    assert capsys.readouterr().err == ""
    await api.client.get("/v1/models", headers={"X-Request-Id": "me"})
    assert capsys.readouterr().err.startswith("INFO:     request me: GET /v1/models 200 in ")


def test_exceptions_and_other_libraries_are_json_too(
    loggers: None, capsys: pytest.CaptureFixture[str]
) -> None:
    set_up_logs("json")
    logging.getLogger("uvicorn.error").info("started %d", 7)
    try:
        raise ValueError("boom")
    except ValueError:
        logging.getLogger("gemserve.engine").exception("it died")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert (first["message"], first["level"], first["logger"]) == (
        "started 7",
        "info",
        "uvicorn.error",
    )
    assert second["level"] == "error"
    assert second["exception"].endswith("ValueError: boom")
    assert first["time"].endswith("Z")


async def test_replies_are_counted_by_status(api: Api) -> None:
    await api.post(CHAT)
    await api.post(CHAT, temperature=9)
    await api.client.get("/nowhere")
    after = await api.metrics()
    assert after['http_responses_total{status="200"}'] == 1
    assert after['http_responses_total{status="400"}'] == 1
    assert after['http_responses_total{status="404"}'] == 1
