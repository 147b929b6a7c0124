"""What one key's requests leave to another key's, over a socket with the built-in model."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from gemserve.api.requests.request_builder import RequestBuilder
from gemserve.api.serving import build_serving
from gemserve.config import ServerConfig
from gemserve.engine.core import Core
from gemserve.engine.scheduling.time_shares import StepTimes
from tests.fakes import COMPLETIONS, parse_metrics, replace_file, wait_for
from tests.served import PATIENCE_S, Served, served

ALICE, BOB = {"Authorization": "Bearer alice"}, {"Authorization": "Bearer bob"}
NUM_REQUESTS, CHOICES, NUM_STREAMED = 12, 4, 100


@pytest.fixture
def server(builtin_core: Core, tmp_path: Path) -> Iterator[Served]:
    config = ServerConfig(api_key_file=replace_file(tmp_path / "keys", "alice", "bob"))
    with served(build_serving(builtin_core, model_name="builtin", config=config)) as server:
        yield server


def metrics(server: Served) -> dict[str, float]:
    return parse_metrics(server.get("/metrics", headers=BOB).text)


def send(server: Served, headers: dict[str, str], **fields: Any) -> socket.socket:
    """Post a completion and return the connection, which nobody reads."""
    body = json.dumps({"model": "builtin", "ignore_eos": True, **fields}).encode()
    lines = [f"POST {COMPLETIONS} HTTP/1.1", "Host: localhost", f"Content-Length: {len(body)}"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    connection = server.connect()
    connection.sendall("\r\n".join([*lines, "", ""]).encode() + body)
    return connection


def test_a_stream_keeps_its_pace_beside_another_key_s_choices(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each token of the stream waited for one of every choice, 97 in all: 9 a second, not 340."""
    # each row of a step costs the same; what this machine measures depends on what else it does
    monkeypatch.setattr(StepTimes, "seconds_of", lambda _, num_rows: 0.02 * num_rows)
    with ExitStack() as stack:
        for number in range(NUM_REQUESTS):
            fields = {"prompt": f"Story {number}", "max_tokens": 250, "n": CHOICES}
            stack.enter_context(send(server, ALICE, **fields))
        running = NUM_REQUESTS * CHOICES
        wait_for(lambda: metrics(server)["num_requests_running"] == running, PATIENCE_S)
        before = metrics(server)["generation_tokens_total"]
        body = {"model": "builtin", "prompt": "Once", "max_tokens": NUM_STREAMED, "stream": True}
        with httpx.stream(
            "POST",
            server.url + COMPLETIONS,
            json={**body, "ignore_eos": True},
            headers=BOB,
            timeout=PATIENCE_S,
        ) as reply:
            assert reply.status_code == 200
            assert list(reply.iter_lines())[-2:] == ["data: [DONE]", ""]
        others = metrics(server)["generation_tokens_total"] - before - NUM_STREAMED
        assert metrics(server)["num_requests_running"] == running
    assert NUM_STREAMED / 2 <= others <= NUM_STREAMED * running / 3


def test_texts_of_clients_that_left_are_not_worked_on(
    server: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """80 requests a second whose clients left took every thread, and another key's waited for 10 s
    behind those that nobody waited for. Nor may they have all places of the queue, which is 128."""
    built: list[str] = []
    gate = threading.Event()
    build = RequestBuilder.build_completion

    def slow(builder: RequestBuilder, body: Any, *rest: Any) -> Any:
        built.append(body.prompt)
        assert "flood" not in body.prompt or gate.wait(2 * PATIENCE_S)
        return build(builder, body, *rest)

    monkeypatch.setattr(RequestBuilder, "build_completion", slow)
    ask = partial(server.post, COMPLETIONS, prompt="Hello", max_tokens=4)
    flood = [send(server, ALICE, prompt=f"flood {n}", max_tokens=4) for n in range(140)]
    with ExitStack() as stack:
        stack.callback(gate.set)
        for connection in flood:
            stack.enter_context(connection)
        wait_for(lambda: bool(built), PATIENCE_S)
        assert ask(headers=BOB).status_code == 200, "while all of the other key's threads hang"
        for connection in flood:
            connection.close()
        assert ask(headers=BOB).status_code == 200  # by now the server has seen that they left
    assert ask(headers=ALICE).status_code == 200  # the 141st of its key
    assert len([prompt for prompt in built if "flood" in prompt]) < 5
