"""A server that answers on a timetable, to see how exactly `load.py` measures on a machine.

    python tests/e2e/load_stub.py --port 9000
    python benchmarks/load.py --url http://127.0.0.1:9000 --model 200,0,20 --requests 100 --rate 20

The model's name is the timetable, `FIRST,SPREAD,GAP` in ms: request i answers after FIRST + SPREAD
* (i % 10) / 9, then sends a word every GAP. The model `faulty` goes through `FAULTS` in turn.
A body with `"filter": KEPT` gets a `filter` object as gemserve's, in every second answer one of a
filter that kept so many tokens.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import threading
import time
from dataclasses import dataclass, field
from typing import Any

MODELS = ("100,0,10", "faulty")
CHARS_PER_TOKEN = 6.5
HANG_S = 20.0
FAULTS = (
    "none",
    "busy",
    "error event",
    "no done",
    "broken json",
    "hang",
    "hang up",
    "no tokens",
    "no text",
)


@dataclass(slots=True)
class Served:
    """What was done for one request: seconds from its arrival."""

    body: dict[str, Any]
    arrived_s: float
    chunks_s: list[float] = field(default_factory=list)
    done_s: float = 0.0


class Stub:
    """The server, in a thread of its own until `close`."""

    def __init__(self, port: int = 0) -> None:
        self.served: list[Served] = []
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        start = asyncio.start_server(self._connection, "127.0.0.1", port)
        self._server = asyncio.run_coroutine_threadsafe(start, self._loop).result(10)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self._close(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    async def _close(self) -> None:
        self._server.close()
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while head := (await reader.readuntil(b"\r\n\r\n")).decode():
                length = re.search(r"content-length: (\d+)", head, re.IGNORECASE)
                body = await reader.readexactly(int(length[1]) if length else 0)
                if head.startswith("GET /v1/models "):
                    _whole(writer, 200, {"data": [{"id": name} for name in MODELS]})
                elif head.startswith("POST /v1/"):
                    await self._answer(_Answer(writer, json.loads(body), "/chat/" in head))
                else:
                    _whole(writer, 404, {"error": {"message": "no such page"}})
                await writer.drain()
        except (asyncio.IncompleteReadError, asyncio.CancelledError, ConnectionError):
            pass  # the client has gone, or the stub is being closed
        finally:
            writer.close()

    async def _answer(self, answer: _Answer) -> None:
        body = answer.body
        index = sum(served.body["model"] == body["model"] for served in self.served)
        served = Served(body, time.perf_counter())
        self.served.append(served)
        fault, timetable = "none", body["model"]
        if timetable == "faulty":
            fault, timetable = FAULTS[index % len(FAULTS)], "20,0,5"
        if fault == "busy":
            _whole(answer.writer, 503, {"error": {"message": "queue full"}})
            return
        first_ms, spread_ms, gap_ms = map(float, timetable.split(","))
        answer.open(index)
        due_s = served.arrived_s + (first_ms + spread_ms * (index % 10) / 9) / 1000
        count = 0 if fault == "no tokens" else body["max_tokens"]
        for number in range(0 if fault == "no text" else count):
            await asyncio.sleep(due_s + number * gap_ms / 1000 - time.perf_counter())
            served.chunks_s.append(time.perf_counter() - served.arrived_s)
            answer.text(f"word{number} ")
            if number == 1:
                await answer.fail(fault)
        answer.end(count, has_done=fault != "no done")
        served.done_s = time.perf_counter() - served.arrived_s


@dataclass(frozen=True, slots=True)
class _Answer:
    """The bytes of one streamed answer."""

    writer: asyncio.StreamWriter
    body: dict[str, Any]
    is_chat: bool

    def open(self, index: int) -> None:
        """All that comes before the first text: none of it may be taken for a token."""
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
        self.writer.write(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode())
        self._text("", self._report(index))
        self._send(": keep-alive\n\n")

    def text(self, text: str) -> None:
        self._text(text, {})

    def _text(self, text: str, more: dict[str, Any]) -> None:
        choice = {"delta": {"content": text}} if self.is_chat else {"text": text}
        self._send(f"data: {json.dumps({'choices': [choice], **more})}\n\n")

    def _report(self, index: int) -> dict[str, Any]:
        """The `filter` object of the first chunk, where one was asked for."""
        kept = self.body.get("filter")
        if kept is None:
            return {}
        applied = index % 2 == 0
        report = {
            "applied": applied,
            "kept_tokens": kept if applied else self._num_tokens,
            "reason": None if applied else "diffuse_attention",
        }
        return {"filter": report}

    @property
    def _num_tokens(self) -> int:
        prompt = self.body["messages"][0]["content"] if self.is_chat else self.body["prompt"]
        return round(len(prompt) / CHARS_PER_TOKEN)

    async def fail(self, fault: str) -> None:
        if fault == "hang":
            await asyncio.sleep(HANG_S)
        elif fault == "hang up":
            self.writer.transport.abort()
            raise ConnectionAbortedError
        elif fault == "error event":
            self._send('data: {"error": {"message": "out of memory"}}\n\n')
        elif fault == "broken json":
            self._send("data: {oops\n\n")

    def end(self, num_tokens: int, *, has_done: bool) -> None:
        usage = {"prompt_tokens": self._num_tokens, "completion_tokens": num_tokens}
        self._send(f"data: {json.dumps({'choices': [], 'usage': usage})}\r\n\r\n")
        if has_done:
            self._send("data: [DONE]\n\n")
        self.writer.write(b"0\r\n\r\n")

    def _send(self, text: str) -> None:
        if self.writer.is_closing():
            raise ConnectionResetError
        self.writer.write(f"{len(text):x}\r\n{text}\r\n".encode())


def _whole(writer: asyncio.StreamWriter, status: int, content: dict[str, Any]) -> None:
    data = json.dumps(content).encode()
    writer.write(f"HTTP/1.1 {status} -\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data)


def main() -> None:
    parser = argparse.ArgumentParser(description="A server with known delays, for load.py.")
    parser.add_argument("--port", type=int, default=9000, help="default: %(default)s")
    stub = Stub(parser.parse_args().port)
    print(f"{stub.url}: Ctrl-C ends it", flush=True)
    try:
        threading.Event().wait()
    except KeyboardInterrupt:
        stub.close()


if __name__ == "__main__":
    main()
