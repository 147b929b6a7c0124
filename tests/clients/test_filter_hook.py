"""The hook of docs/clients.md: gemserve filters what another vendor's model gets."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.clients.litellm_proxy import KEY, proxy
from tests.clients.servers import NOTES, QUESTION

HOOK = Path(__file__).parents[2] / "docs" / "examples" / "litellm_filter.py"
HI: Any = [{"role": "user", "content": "Hi"}]


class Vendor(BaseHTTPRequestHandler):
    """Another vendor's model: remembers what it was sent."""

    bodies: list[dict[str, Any]]

    def do_POST(self) -> None:
        length = int(self.headers["Content-Length"])
        self.bodies.append(json.loads(self.rfile.read(length)))
        message = {"role": "assistant", "content": "48213"}
        usage = {"prompt_tokens": 9, "completion_tokens": 1, "total_tokens": 10}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        reply = json.dumps(
            {
                "id": "chatcmpl-1",
                "object": "chat.completion",
                "created": 1,
                "model": "vendor",
                "choices": [choice],
                "usage": usage,
            }
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture(scope="module")
def vendor() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    bodies: list[dict[str, Any]] = []
    stub = type("Stub", (Vendor,), {"bodies": bodies})
    with ThreadingHTTPServer(("127.0.0.1", 0), stub) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/v1", bodies
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def filtering(
    vendor: tuple[str, list[dict[str, Any]]],
    builtin_url: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[str]:
    """The proxy with the hook of the guide in front of the other vendor's model."""
    folder = tmp_path_factory.mktemp("hook")
    shutil.copy(HOOK, folder)
    models = {"vendor": vendor[0], "real": f"{builtin_url}/v1"}
    with proxy(folder, models, callbacks="litellm_filter.handler") as started:
        yield started


def test_the_hook_is_short() -> None:
    assert len(HOOK.read_text(encoding="utf-8").splitlines()) <= 60


@pytest.mark.parametrize("shape", ["one message", "two messages", "parts"])
def test_the_hook_forwards_what_the_question_needs(
    filtering: str, vendor: tuple[str, list[dict[str, Any]]], shape: str
) -> None:
    """The vendor gets the fact, the question once, and a fraction of the document."""
    messages: Any = [{"role": "user", "content": f"{NOTES}\n\n{QUESTION}"}]
    if shape == "two messages":
        messages = [{"role": "system", "content": NOTES}, {"role": "user", "content": QUESTION}]
    if shape == "parts":
        parts = [{"type": "text", "text": NOTES}, {"type": "text", "text": QUESTION}]
        messages = [{"role": "user", "content": parts}]
    _, bodies = vendor
    bodies.clear()
    with openai.OpenAI(base_url=f"{filtering}/v1", api_key=KEY, max_retries=0) as client:
        reply = client.chat.completions.create(model="vendor", messages=messages)
    assert reply.choices[0].message.content == "48213"
    sent = json.dumps(bodies[0]["messages"])
    assert "48213" in sent
    assert sent.count(QUESTION) == 1
    assert len(sent) < len(NOTES) / 4


def test_the_hook_leaves_short_prompts(
    filtering: str, vendor: tuple[str, list[dict[str, Any]]]
) -> None:
    _, bodies = vendor
    bodies.clear()
    with openai.OpenAI(base_url=f"{filtering}/v1", api_key=KEY, max_retries=0) as client:
        client.chat.completions.create(model="vendor", messages=HI)
    assert bodies[0]["messages"] == HI
