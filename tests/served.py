"""A whole server on a free port, as `gemserve serve` runs it, for tests over a socket."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import httpx

from gemserve.api.app import create_app
from gemserve.api.serving import Serving
from gemserve.http_server.draining_server import HttpServer, http_server
from gemserve.synthetic.prose import stdlib_sentences
from tests.fakes import parse_metrics, wait_for

# a filter that keeps exactly so many tokens, whatever attention is like
KEEP: dict[str, Any] = {
    "method": "sieve",
    "keep": 192,
    "fallback": False,
    "return_selection": True,
}
PATIENCE_S = 120.0  # seconds, for machines that are busy


@dataclass(frozen=True, slots=True)
class Served:
    """A running server."""

    port: int
    serving: Serving
    server: HttpServer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def post(
        self, path: str, *, headers: dict[str, str] | None = None, **fields: Any
    ) -> httpx.Response:
        """Post these fields and the model's name."""
        body = {"model": self.serving.model_name, **fields}
        return httpx.post(self.url + path, json=body, headers=headers, timeout=PATIENCE_S)

    def ask(self, path: str, **fields: Any) -> dict[str, Any]:
        """The body of a reply that must be a 200."""
        reply = self.post(path, **fields)
        assert reply.status_code == 200, reply.text
        body: dict[str, Any] = reply.json()
        return body

    def get(self, path: str, headers: dict[str, str] | None = None) -> httpx.Response:
        return httpx.get(self.url + path, headers=headers, timeout=PATIENCE_S)

    def metrics(self) -> dict[str, float]:
        return parse_metrics(self.get("/metrics").text)

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=PATIENCE_S)

    def send(self, path: str, **fields: Any) -> socket.socket:
        """Post these fields and return the open connection."""
        body = json.dumps({"model": self.serving.model_name, **fields}).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body)}\r\n\r\n"
        connection = self.connect()
        connection.sendall(head.encode() + body)
        return connection


@contextmanager
def served(serving: Serving) -> Iterator[Served]:
    server = http_server(
        create_app(serving), serving.engine, serving.config, port=0, log_config=None
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started, PATIENCE_S)
    try:
        yield Served(server.servers[0].sockets[0].getsockname()[1], serving, server)
    finally:
        serving.engine.stop()
        server.should_exit = True
        thread.join(20)


def prose(tokenizer: Any, num_tokens: int, seed: int) -> str:
    """Sentences without a fact that anybody asks for: consecutive ones from a random place on."""
    sentences, encode = stdlib_sentences(), tokenizer.backend_tokenizer.encode
    start, chosen = Random(seed).randrange(len(sentences)), list[str]()
    while True:
        sentence = sentences[(start + len(chosen)) % len(sentences)]
        num_tokens -= len(encode(f" {sentence}", add_special_tokens=False).ids)
        if num_tokens < 0:
            return " ".join(chosen)
        chosen.append(sentence)
