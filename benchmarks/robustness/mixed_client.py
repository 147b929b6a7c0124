"""Sends one request of a mix in the manner of a good or bad client, and compares its answer.

Manners: `whole` and `stream` read the answer. `cancel` closes a stream after its first events.
`slow` reads a few bytes at a time. `half` leaves in the middle of the body. `stored` keeps a
document, asks about it and deletes it. `shelf` makes a library of one file, asks it and deletes it.
`reload` replaces an adapter.
"""

from __future__ import annotations

import asyncio
import json
import socket
import ssl
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import httpx

from benchmarks.robustness.answers import MESSAGES, Answer, StreamedAnswer, answer_of, difference
from benchmarks.robustness.load_server import ADMIN, TURNING, LoadServer
from gemserve_client.load_test.streamed_request import EventDecoder

SLOW_BYTES, SLOW_PAUSE_S = 512, 0.05
RECEIVE_BUFFER = 4096
CANCEL_AFTER = 3  # events with text
CONNECTIONS_OF_POOL = 16
_REFUSALS = (429, 503)


@dataclass(slots=True, kw_only=True)
class Call:
    """One request, and the answers that are right. `status` is the one that it must get."""

    name: str
    path: str
    body: Any
    tenant: str
    manner: str
    status: int = 200
    method: str = "POST"
    bound_s: float = 120.0
    expected: list[Answer] = field(default_factory=list)

    @property
    def kind(self) -> str:
        return self.name.split("/")[0]


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What became of a request. `verdict`: right, wrong, refused, timeout or failed.

    Times are in seconds: `due_s` on the clock of the run, `ttft_s` and `total_s` from the start.
    """

    name: str
    due_s: float
    verdict: str = "failed"
    detail: str = ""
    status: int = 0
    retry_after_s: float | None = None
    ttft_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    total_s: float = 0.0
    answer: Answer | None = None


class Wrong(Exception):
    """An answer or a status is not what it must be."""


class Refused(Exception):
    """The server is too busy, and says so."""


class MixedClient:
    """Sends calls to one server.

    The connections are in several pools, whose turn it is one after the other: for each request
    httpx compares all connections of a pool with all others.
    """

    def __init__(self, server: LoadServer, *, connections: int) -> None:
        self._server = server
        self._of_pool = min(connections, CONNECTIONS_OF_POOL)
        self._num_pools = -(-connections // self._of_pool)
        self._pools = self._new()
        self._turns = count()
        self._shelves = count()

    async def close(self) -> None:
        for pool in self._pools:
            await pool.aclose()

    async def drop_connections(self) -> None:
        """Close all connections. The next calls open new ones."""
        await self.close()
        self._pools = self._new()

    @property
    def _http(self) -> httpx.AsyncClient:
        return self._pools[next(self._turns) % len(self._pools)]

    def _new(self) -> list[httpx.AsyncClient]:
        # the sender bounds what is open: a full pool would make a request wait here
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=self._of_pool)
        # without timeouts, as each call has its own bound; one context, since it takes 30 ms
        context = ssl.create_default_context()
        return [
            httpx.AsyncClient(
                base_url=self._server.url, timeout=None, limits=limits, verify=context
            )
            for _ in range(self._num_pools)
        ]

    async def send(self, call: Call, due_s: float) -> Outcome:
        """Send `call` and say what became of it. Raises only CancelledError."""
        outcome = Outcome(name=call.name, due_s=due_s)
        began_s = time.perf_counter()
        try:
            async with asyncio.timeout(call.bound_s):
                await getattr(self, f"_{call.manner}")(call, outcome, began_s)
            outcome.verdict = "right"
        except Wrong as error:
            outcome.verdict, outcome.detail = "wrong", str(error)
        except Refused as error:
            outcome.verdict, outcome.detail = "refused", str(error)
        except TimeoutError:
            outcome.verdict, outcome.detail = "timeout", f"no end within {call.bound_s:g} s"
        except (httpx.HTTPError, OSError, asyncio.IncompleteReadError) as error:
            outcome.detail = f"{type(error).__name__}: {error}"[:300]
        except (AssertionError, KeyError, ValueError, TypeError, IndexError) as error:
            outcome.verdict, outcome.detail = "wrong", f"{type(error).__name__}: {error}"[:300]
        outcome.total_s = time.perf_counter() - began_s
        return outcome

    async def _whole(self, call: Call, outcome: Outcome, began_s: float) -> None:
        del began_s
        reply = await self._request(call, outcome)
        self._judge(call, outcome, answer_of(call.path, reply.json()))

    async def _stream(self, call: Call, outcome: Outcome, began_s: float) -> None:
        streamed = StreamedAnswer(call.path)
        async with aclosing(self._events(call, outcome, began_s, streamed)) as events:
            async for _ in events:
                pass
        if not streamed.is_ended:
            raise Wrong("the stream has no last event")
        self._judge(call, outcome, streamed.answer())

    async def _cancel(self, call: Call, outcome: Outcome, began_s: float) -> None:
        streamed = StreamedAnswer(call.path)
        seen = 0
        async with aclosing(self._events(call, outcome, began_s, streamed)) as events:
            async for brings_text in events:
                seen += brings_text
                if seen >= CANCEL_AFTER:
                    break  # which closes the connection
        texts = [answer["choices"][0]["text"] for answer in call.expected]
        if texts and not any(text.startswith(streamed.text) for text in texts):
            raise Wrong(f"expected {texts[0][:200]!r}, got {streamed.text!r}")

    async def _slow(self, call: Call, outcome: Outcome, began_s: float) -> None:
        del began_s
        reader, writer = await self._connect()
        try:
            writer.write(self._head(call) + _content(call))
            raw = bytearray()
            while part := await reader.read(SLOW_BYTES):
                raw += part
                await asyncio.sleep(SLOW_PAUSE_S)
        finally:
            writer.close()
        head, _, body = bytes(raw).partition(b"\r\n\r\n")
        outcome.status = int(head.split()[1])
        if outcome.status in _REFUSALS:
            raise Refused(f"status {outcome.status}")
        if outcome.status != call.status:
            raise Wrong(f"status {outcome.status}: {body[:300]!r}")
        streamed = StreamedAnswer(call.path)
        for data in EventDecoder().feed(_without_chunks(body)):
            streamed.see(data)
        self._judge(call, outcome, streamed.answer())

    async def _half(self, call: Call, outcome: Outcome, began_s: float) -> None:
        del began_s, outcome
        _, writer = await self._connect()
        content = _content(call)
        writer.write(self._head(call) + content[: len(content) // 2])
        await writer.drain()
        await asyncio.sleep(0.05)
        writer.transport.abort()

    async def _stored(self, call: Call, outcome: Outcome, began_s: float) -> None:
        del began_s
        headers = self._headers(call)
        made = await self._http.post("/v1/documents", json=call.body["document"], headers=headers)
        self._check_status(made, 200, outcome)
        name = made.json()["id"]
        part = {"type": "file", "file": {"file_id": name}}
        content = [part, {"type": "text", "text": call.body["question"]}]
        body = {**call.body["fields"], "messages": [{"role": "user", "content": content}]}
        try:
            reply = await self._http.post(call.path, json=body, headers=headers)
            self._check_status(reply, 200, outcome)
        finally:
            await self._delete(f"/v1/documents/{name}", headers, outcome)
        self._judge(call, outcome, answer_of(call.path, reply.json()))

    async def _shelf(self, call: Call, outcome: Outcome, began_s: float) -> None:
        del began_s
        headers = self._headers(call)
        name = f"shelf-{next(self._shelves)}"
        try:
            await self.add_file(call.tenant, name, call.body["file"])
        except BaseException:  # a client that has waited too long leaves no library behind
            await self._http.delete(f"/v1/libraries/{name}", headers=headers)
            raise
        body = {**call.body["question"], "filter": {"library": name, "candidates": 2}}
        try:
            reply = await self._http.post(call.path, json=body, headers=headers)
            self._check_status(reply, 200, outcome)
        finally:
            await self._delete(f"/v1/libraries/{name}", headers, outcome)
        self._judge(call, outcome, answer_of(call.path, reply.json()))

    async def _delete(self, path: str, headers: dict[str, str], outcome: Outcome) -> None:
        """Delete something that is then not there."""
        gone = await self._http.delete(path, headers=headers)
        self._check_status(gone, 200, outcome)
        missing = await self._http.get(path, headers=headers)
        self._check_status(missing, 404, outcome)

    async def add_file(self, tenant: str, library: str, file: dict[str, str]) -> None:
        """Add a file to a library of the tenant's, which is made if there is none of that name.

        Raises `Refused` if the server is too busy, and `Wrong` if it does not take the file.
        """
        headers = {"authorization": f"Bearer {self._server.keys[tenant]}"}
        outcome = Outcome(name="file", due_s=0.0)
        known = await self._http.get(f"/v1/libraries/{library}", headers=headers)
        if known.status_code == 404:
            made = await self._http.post("/v1/libraries", json={"name": library}, headers=headers)
            self._check_status(made, 200, outcome)
        path = f"/v1/libraries/{library}/files?wait=true"
        added = await self._http.post(path, json=file, headers=headers)
        self._check_status(added, 200, outcome)
        if added.json()["status"] != "ready":
            raise Wrong(f"file {file['path']}: {added.text[:300]}")

    async def _reload(self, call: Call, outcome: Outcome, began_s: float) -> None:
        del began_s
        await self._request(call, outcome)

    async def _events(
        self, call: Call, outcome: Outcome, began_s: float, streamed: StreamedAnswer
    ) -> AsyncGenerator[bool]:
        """Yield for each event whether it brings text. Notes the times of those that do."""
        last_s: float | None = None
        http = self._http
        request = http.build_request(
            call.method, call.path, content=_content(call), headers=self._headers(call)
        )
        reply = await http.send(request, stream=True)
        try:
            if reply.status_code != call.status:
                await reply.aread()
            self._check_status(reply, call.status, outcome)
            decoder = EventDecoder()
            async for part in reply.aiter_bytes():
                now_s = time.perf_counter()
                for data in decoder.feed(part):
                    brings_text = streamed.see(data)
                    if brings_text and last_s is None:
                        outcome.ttft_s = now_s - began_s
                    elif brings_text and last_s is not None:
                        outcome.gaps_s.append(now_s - last_s)
                    last_s = now_s if brings_text else last_s
                    yield brings_text
        finally:
            await reply.aclose()

    async def _request(self, call: Call, outcome: Outcome) -> httpx.Response:
        content = None if call.method == "GET" else _content(call)
        reply = await self._http.request(
            call.method, call.path, content=content, headers=self._headers(call)
        )
        self._check_status(reply, call.status, outcome)
        return reply

    def _judge(self, call: Call, outcome: Outcome, answer: Answer) -> None:
        outcome.answer = answer
        wrong = difference(call.expected, answer) if call.expected else None
        if wrong is not None:
            raise Wrong(wrong)

    def _check_status(self, reply: httpx.Response, status: int, outcome: Outcome) -> None:
        outcome.status = reply.status_code
        if reply.status_code == status:
            return
        if reply.status_code in _REFUSALS:
            after = reply.headers.get("retry-after")
            outcome.retry_after_s = None if after is None else float(after)
            raise Refused(f"{reply.status_code}: {reply.text[:200]}")
        raise Wrong(f"status {reply.status_code} in place of {status}: {reply.text[:300]}")

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER)
        connection.setblocking(False)
        await asyncio.get_running_loop().sock_connect(connection, ("127.0.0.1", self._server.port))
        return await asyncio.open_connection(sock=connection, limit=RECEIVE_BUFFER)

    def _headers(self, call: Call) -> dict[str, str]:
        key = self._server.keys.get(call.tenant, "wrong")
        name = "x-api-key" if call.path == MESSAGES else "authorization"
        value = key if call.path == MESSAGES else f"Bearer {key}"
        return {name: value, "content-type": "application/json"}

    def _head(self, call: Call) -> bytes:
        fields = {
            "host": "127.0.0.1",
            "connection": "close",
            "content-length": str(len(_content(call))),
            **self._headers(call),
        }
        lines = [f"POST {call.path} HTTP/1.1", *(f"{k}: {v}" for k, v in fields.items()), "", ""]
        return "\r\n".join(lines).encode()


def reloading(path: str) -> Call:
    """The call that loads the adapter `TURNING` from the folder `path`."""
    body = {"name": TURNING, "path": path}
    return Call(
        name=f"reload/{path}", path="/v1/adapters", body=body, tenant=ADMIN, manner="reload"
    )


def _content(call: Call) -> bytes:
    return call.body if isinstance(call.body, bytes) else json.dumps(call.body).encode()


def _without_chunks(body: bytes) -> bytes:
    """The content of a body in chunked coding."""
    content = bytearray()
    while body:
        size, _, body = body.partition(b"\r\n")
        length = int(size, 16)
        content += body[:length]
        body = body[length + 2 :]
        if length == 0:
            break
    return bytes(content)
