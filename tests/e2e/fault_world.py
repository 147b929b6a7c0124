"""A server of a tiny model on a real socket, with everything that a fault may strike, and requests.

It has adapters, a document cache with a folder, and upper layers that rest on the host.
`GEMSERVE_TEST_MODEL` names another model, which is loaded as a server loads it; its texts are not
compared.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import httpx
import torch

from gemserve.api.app import create_app
from gemserve.api.serving import Serving, build_serving
from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve.engine.core import Core
from gemserve.http_server.draining_server import HttpServer, http_server
from gemserve.model.loading.loader import load, place
from tests import adapters, models
from tests.cores import core_over
from tests.e2e.fault_seams import VICTIM_SEED, VICTIM_STOP, VICTIM_WORD
from tests.fakes import CHAT, COMPLETIONS, wait_for

MODEL = "tiny"
REAL_MODEL = os.environ.get("GEMSERVE_TEST_MODEL")
WORDS = ("duck", "mosaic", "cave", "ivory", "piano", "round", "album", "rocket", "winter", "wolf")
Json = dict[str, Any]


def text_of(seed: int, num_words: int, mark: str = "") -> str:
    """A document; every fifth word is the mark, if there is one."""
    rng = Random(seed)
    words = [rng.choice(WORDS) for _ in range(num_words)]
    if mark:
        words[::5] = [mark] * len(words[::5])
    return " ".join(words)


VICTIM: Json = {
    "prompt": f"{text_of(1, 400, VICTIM_WORD)}\nWhere is the wolf?",
    "seed": VICTIM_SEED,
    "temperature": 0.7,
    "max_tokens": 8,
    "stop": [VICTIM_STOP],
    "stream": True,
    "filter": {"method": "sieve", "keep": 80},
}
OTHERS: tuple[tuple[str, Json], ...] = (
    (
        CHAT,
        {
            "messages": [{"role": "user", "content": text_of(2, 40)}],
            "seed": 1,
            "max_tokens": 24,
            "stream": True,
        },
    ),
    (
        COMPLETIONS,
        {
            "prompt": f"{text_of(3, 200)}\nWhere is the duck?",
            "max_tokens": 12,
            "temperature": 0,
            "filter": {"method": "sieve", "keep": 64},
        },
    ),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a request ended: `kind` is "answered", "error", or "left" if its connection broke."""

    kind: str
    text: str
    error: str = ""


LEFT = Outcome("left", "")


@dataclass(frozen=True, slots=True)
class World:
    port: int
    server: HttpServer
    serving: Serving
    core: Core
    adapter_dir: Path
    victim_token: int  # one that every chunk of the victim's prompt has, and no other prompt

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def settle(self) -> None:
        """Wait until nothing runs, nothing is written, and nobody is connected."""
        engine = self.serving.engine
        wait_for(lambda: not engine._jobs and not engine._inbox and self.core.is_idle, 20)
        wait_for(lambda: not self.server.server_state.tasks, 20)

    def empty_memory(self) -> None:
        """Drop all documents from memory; files stay."""
        self.settle()
        self.core._scheduler.cache.make_room(self.core.num_units)
        assert not self.core._scheduler.cache.used

    def empty_caches(self) -> None:
        self.empty_memory()
        disk = self.core._disk
        assert disk is not None
        for info in disk.folder.files:
            disk.folder.remove(info)
        disk._writes_again_s = 0.0  # a full disk ends that for a minute

    def assert_nothing_is_held(self) -> None:
        """No memory but that of cached documents, no sequence, no file half written."""
        self.settle()
        core = self.core
        core.check_integrity()
        assert core.kv_bytes_used == 0
        assert not core._jobs
        assert not core._runner._states
        disk = core._disk
        assert disk is not None
        assert not disk._loads
        assert not list(disk.folder.path.glob("*.tmp"))


@contextmanager
def world(folder: Path, tokenizer: Any) -> Iterator[World]:
    if REAL_MODEL is None:
        # three layers share two places, so that every pass copies
        model = place(models.build("llama"), torch.device("cpu"), 3)
    else:
        loaded = load(ModelConfig(model=REAL_MODEL, device="cpu"))
        model, tokenizer = loaded.model, loaded.tokenizer
    config = EngineConfig(
        filter_layer=0,
        filter_min_tokens=64,
        kv_memory_bytes=32 << 20 if REAL_MODEL is None else 1 << 30,
        min_chunk_tokens=64,
        max_chunk_tokens=160,
        cache_dir=str(folder / "cache"),
    )
    core = core_over(model, tokenizer, config, eos_ids=frozenset())
    adapter_dir = folder / "adapters"
    adapters.write(adapter_dir / "good", "ntk", model)
    settings = ServerConfig(port=0, adapter_dir=str(adapter_dir), keep_alive_s=60)
    serving = build_serving(core, model_name=MODEL, config=settings)
    server = http_server(
        create_app(serving), serving.engine, settings, log_config=None, access_log=False
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_for(lambda: server.started, 20)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        token = tokenizer.encode(f" {VICTIM_WORD}")[-1]
        yield World(port, server, serving, core, adapter_dir, token)
    finally:
        serving.engine.stop()
        server.should_exit = True
        thread.join(20)


async def ask(
    client: httpx.AsyncClient, path: str, body: Json, begun: asyncio.Event | None = None
) -> Outcome:
    """Send a request and read its reply to the end. `begun` is set when its text begins."""
    try:
        async with client.stream("POST", path, json={"model": MODEL, **body}) as reply:
            if not body.get("stream"):
                if begun is not None:
                    begun.set()
                return _whole(reply.status_code, json.loads(await reply.aread()))
            if reply.status_code != 200:
                return _whole(reply.status_code, json.loads(await reply.aread()))
            return await _streamed(reply, begun)
    except httpx.TransportError as error:
        return Outcome("left", "", repr(error))


def _whole(status: int, content: Json) -> Outcome:
    if status != 200:
        assert set(content["error"]) == {"message", "type", "param", "code"}, content
        return Outcome("error", "", content["error"]["message"])
    return Outcome("answered", _text([content]))


def ask_by_socket(port: int, body: Json, how: str) -> Outcome:
    """Send the victim's request by a client that reads slowly, or resets its connection."""
    content = json.dumps({"model": MODEL, **body}).encode()
    lines = [
        f"POST {COMPLETIONS} HTTP/1.1",
        "Host: localhost",
        "X-Victim: 1",
        "Connection: close",
        f"Content-Length: {len(content)}",
    ]
    with socket.create_connection(("127.0.0.1", port), timeout=60) as connection:
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + content)
        data = b""
        while part := connection.recv(200):
            data += part
            if how == "delay":
                time.sleep(0.01)
            if how == "reset" and b"data: " in data:
                linger = struct.pack("ii", 1, 0)  # closing sends RST
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                return LEFT
    text = data.decode()
    if "[DONE]" not in text:
        return LEFT
    found = [line for line in text.splitlines() if line.startswith("data: {")]
    return Outcome("answered", _text([json.loads(line[6:]) for line in found]))


async def _streamed(reply: httpx.Response, begun: asyncio.Event | None) -> Outcome:
    """Exactly one terminal event: the end of the answer, or one error; then one `[DONE]`."""
    lines = []
    async for line in reply.aiter_lines():
        if line.startswith("data: "):
            lines.append(line.removeprefix("data: "))
            if begun is not None:
                begun.set()
    assert lines.count("[DONE]") == 1, lines
    assert lines[-1] == "[DONE]", lines
    chunks = [json.loads(line) for line in lines[:-1]]
    errors = [chunk for chunk in chunks if "error" in chunk]
    reasons = [
        choice["finish_reason"]
        for chunk in chunks
        for choice in chunk.get("choices", [])
        if choice["finish_reason"] is not None
    ]
    assert len(errors) + len(reasons) == 1, chunks
    if errors:
        assert chunks[-1] is errors[0], chunks
        return Outcome("error", "", errors[0]["error"]["message"])
    return Outcome("answered", _text(chunks))


def _text(chunks: list[Json]) -> str:
    if REAL_MODEL is not None:  # which tokens are drawn depends on what is computed beside them
        return ""
    parts = [
        choice.get("delta") or choice.get("message") or {"content": choice.get("text")}
        for chunk in chunks
        for choice in chunk["choices"]
    ]
    return "".join(part.get("content") or "" for part in parts)
