"""What an attacker's day found, each over a socket: docs/log/attacks.md has the harm it did."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.fakes import (
    COMPLETIONS,
    FILTERED,
    FakeCore,
    replace_file,
    serving_over,
    wait_for,
)
from tests.served import PATIENCE_S, Served, served

DOCUMENTS = "/v1/documents"
ALICE, BOB = {"Authorization": "Bearer alice"}, {"Authorization": "Bearer bob"}
Serve = Callable[..., Served]


@pytest.fixture
def serve(tokenizer: Any) -> Iterator[Serve]:
    """Starts a server over a scripted core with these settings."""
    with ExitStack() as stack:

        def start(core: FakeCore, **settings: Any) -> Served:
            serving = serving_over(core, tokenizer, max_queue=16, **settings)
            running: AbstractContextManager[Served] = served(serving)
            return stack.enter_context(running)

        yield start


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    return replace_file(tmp_path / "keys", "alice", "bob")


def store(server: Served, key: dict[str, str], **fields: Any) -> httpx.Response:
    return httpx.post(
        server.url + DOCUMENTS,
        json={"text": "The river runs past the houses. " * 40, **fields},
        headers=key,
        timeout=PATIENCE_S,
    )


def test_a_warm_up_counts_until_it_has_ended(serve: Serve, key_file: str) -> None:
    """The reply came at once and gave the place back, while the engine went on reading."""
    gate = threading.Event()
    core = FakeCore(FILTERED, gate)
    server = serve(core, api_key_file=key_file, concurrency_per_key=2)
    first, second = store(server, ALICE), store(server, ALICE)
    assert (first.status_code, second.status_code) == (200, 200)
    third = store(server, ALICE)
    assert third.status_code == 429
    assert third.json()["error"]["code"] == "concurrency_limit_exceeded"
    assert server.post(COMPLETIONS, headers=ALICE, prompt="Hi").status_code == 429
    assert store(server, BOB).status_code == 200
    gone = httpx.delete(f"{server.url}{DOCUMENTS}/{second.json()['id']}", headers=ALICE)
    assert gone.status_code == 200
    wait_for(lambda: store(server, ALICE).status_code == 200)  # it no longer runs
    gate.set()
    wait_for(lambda: server.metrics()["num_requests_running"] == 0)
    wait_for(lambda: store(server, ALICE, wait=True).status_code == 200)
