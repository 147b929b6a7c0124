"""What does one key's attack cost another key, and is every answer right?

    python benchmarks/robustness/hostile_key.py churn pdfs --seconds 20

A server of the built-in model, or of `--model`, has two keys. Alice attacks from a process of her
own. Bob streams 24 tokens again and again, while `/health` is asked 20 times a second. Without
names all attacks run, one after the other, each after a time without one. The last line is JSON.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import secrets
import statistics
import sys
import tempfile
import time
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import httpx

from benchmarks.shared.server_process import ServeProcess
from gemserve_client.load_test.traffic import COMMON_WORDS

READY_S = 300.0
ALICE, BOB = {"Authorization": "Bearer alice"}, {"Authorization": "Bearer bob"}
DOCUMENTS, CHAT, COMPLETIONS = "/v1/documents", "/v1/chat/completions", "/v1/completions"
SETTINGS = [
    *("--served-model-name", "served", "--otel", "off", "--device", "cpu"),
    *("--filter-min-tokens", "256"),
]
WORDS = COMMON_WORDS.split()
POLITE = {
    "model": "served",
    "messages": [{"role": "user", "content": "Tell me about rivers and houses."}],
    "max_tokens": 24,
    "ignore_eos": True,
    "temperature": 0,
}


def text_of(rng: Random, num_words: int) -> str:
    return " ".join(rng.choices(WORDS, k=num_words))


@dataclass(slots=True)
class Seen:
    """What the polite key saw. Times in seconds."""

    health_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    first_s: list[float] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    resident: list[int] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        def ms(values: list[float], share: float) -> float | None:
            ranked = sorted(values)
            place = min(len(ranked) - 1, int(share * len(ranked)))
            return round(1000 * ranked[place], 1) if ranked else None

        return {
            "health_p99_ms": ms(self.health_s, 0.99),
            "health_max_ms": ms(self.health_s, 1),
            "gap_p50_ms": ms(self.gaps_s, 0.5),
            "gap_p99_ms": ms(self.gaps_s, 0.99),
            "first_token_p99_ms": ms(self.first_s, 0.99),
            "answers": len(self.first_s),
            "wrong": len(self.wrong),
            "resident_before_mb": self.resident[0] >> 20,
            "resident_peak_mb": max(self.resident) >> 20,
        }


async def stream_text(http: httpx.AsyncClient, seen: Seen) -> str:
    """Bob's answer. Between two of its events is a gap."""
    last_s, text, is_first = time.monotonic(), "", True
    async with http.stream("POST", CHAT, json={**POLITE, "stream": True}, headers=BOB) as reply:
        reply.raise_for_status()
        async for line in reply.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now_s = time.monotonic()
            (seen.first_s if is_first else seen.gaps_s).append(now_s - last_s)
            is_first, last_s = False, now_s
            for choice in json.loads(line[6:]).get("choices", ()):
                text += choice["delta"].get("content") or ""
    return text


async def watch(server: ServeProcess, seen: Seen, expected: str, seconds: float) -> None:
    """Stream, ask `/health` and look at the memory, for so long."""
    ends_s = time.monotonic() + seconds

    async def stream(http: httpx.AsyncClient) -> None:
        while time.monotonic() < ends_s:
            try:
                text = await stream_text(http, seen)
            except httpx.HTTPError as error:
                text = f"{type(error).__name__}: {error}"
                await asyncio.sleep(0.2)
            if text != expected:
                seen.wrong.append(text)

    async def probe(http: httpx.AsyncClient) -> None:
        while time.monotonic() < ends_s:
            began_s = time.monotonic()
            (await http.get("/health")).raise_for_status()
            seen.health_s.append(time.monotonic() - began_s)
            seen.resident.append(server.resident_bytes())
            await asyncio.sleep(0.05)

    async with httpx.AsyncClient(base_url=server.url, timeout=120) as http:
        await asyncio.gather(stream(http), probe(http))


class Attacker:
    """Alice. `counts`: how many replies of each status she got; `told`: what she learned."""

    def __init__(
        self, http: httpx.AsyncClient, seconds: float, bobs: str, files: dict[str, bytes]
    ) -> None:
        self.http, self.ends_s = http, time.monotonic() + seconds
        self.bobs, self.files = bobs, files
        self.counts: Counter[str] = Counter()
        self.told: dict[str, Any] = {}

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response | None:
        try:
            reply = await self.http.request(method, path, **options)
        except httpx.HTTPError as error:
            self.counts[type(error).__name__] += 1
            return None
        code = ""
        if reply.status_code >= 400 and reply.content[:1] == b"{":
            error = reply.json()["error"]
            code = f" {error['code'] if isinstance(error, dict) else error}"
        self.counts[f"{method} {path.split('doc-')[0]} {reply.status_code}{code}"] += 1
        return reply

    async def side_by_side(self, number: int, work: Callable[[Random], Awaitable[None]]) -> None:
        async def repeat(seed: int) -> None:
            rng = Random(seed)
            while time.monotonic() < self.ends_s:
                await work(rng)

        await asyncio.gather(*(repeat(seed) for seed in range(number)))

    async def foreign(self) -> None:
        """Another key's id and text: what can be done with them, and what do times tell?"""
        taken: dict[str, list[float]] = {"another key's": [], "unknown": []}

        async def work(rng: Random) -> None:
            for name, document in (("another key's", self.bobs), ("unknown", new_id())):
                began_s = time.perf_counter()
                await self.send("GET", f"{DOCUMENTS}/{document}")
                taken[name].append(time.perf_counter() - began_s)
                await self.send("DELETE", f"{DOCUMENTS}/{document}")
                asked = {"prompt": "What is the code?", "document": document, "max_tokens": 1}
                await self.send("POST", COMPLETIONS, json={"model": "served", **asked})
                part = [{"type": "file", "file": {"file_id": document}}]
                messages = {"messages": [{"role": "user", "content": part}]}
                await self.send("POST", "/tokenize", json={"model": "served", **messages})
                await self.send("POST", CHAT, json={"model": "served", **messages})

        await self.side_by_side(1, work)
        for name, times in taken.items():
            self.told[f"GET of {name} id, median ms"] = 1000 * statistics.median(times)

    async def timing(self) -> None:
        """Is a text that another key has stored answered sooner than a new one?"""
        taken: dict[str, list[float]] = {"another key's": [], "new": [], "own": []}
        cached: Counter[str] = Counter()
        rng = Random(17)
        texts = [text_of(Random(1000 + seed), 1500) for seed in range(8)]  # Bob has stored them
        for text in texts:
            new = text_of(rng, 1500)
            for name, asked in (("another key's", text), ("new", new), ("own", new)):
                began_s = time.perf_counter()
                prompt = f"{asked}\n\nWhat is the code?"
                fields = {"prompt": prompt, "max_tokens": 1, "filter": {"method": "sieve"}}
                reply = await self.send("POST", COMPLETIONS, json={"model": "served", **fields})
                taken[name].append(time.perf_counter() - began_s)
                if reply is not None and reply.status_code == 200:
                    cached[name] += reply.json()["filter"]["cached_tokens"]
        for name, times in taken.items():
            self.told[f"{name} text, median ms"] = 1000 * statistics.median(times)
            self.told[f"{name} text, cached tokens"] = cached[name]

    async def churn(self) -> None:
        """Documents stored, asked about and deleted at once, in any order."""

        async def work(rng: Random) -> None:
            text = text_of(rng, rng.choice((200, 1500, 4000)))
            wait = rng.random() < 0.3
            reply = await self.send("POST", DOCUMENTS, json={"text": text, "wait": wait})
            if reply is None or reply.status_code != 200:
                await asyncio.sleep(0.05)
                return
            path = f"{DOCUMENTS}/{reply.json()['id']}"
            body = {"model": "served", "prompt": "Which?", "document": path.rsplit("/", 1)[1]}
            calls = [
                self.send("POST", COMPLETIONS, json={**body, "max_tokens": 4}),
                self.send("GET", DOCUMENTS),
                self.send("DELETE", path),
                self.send("DELETE", path),
            ]
            rng.shuffle(calls)
            await asyncio.gather(*calls)

        await self.side_by_side(8, work)

    async def constraints(self) -> None:
        """New schemas, most stop strings and most biases, for several choices, again and again."""

        async def work(rng: Random) -> None:
            names = {secrets.token_hex(8): {"type": "string", "maxLength": 9} for _ in range(40)}
            schema = {"type": "object", "properties": names, "required": list(names)}
            stops = [secrets.token_hex(490) for _ in range(16)]
            body = {
                **POLITE,
                "n": 8,
                "stop": stops,
                "logit_bias": {str(token): rng.randrange(-5, 5) for token in range(1000, 2024)},
                "max_tokens": 32,
            }
            if rng.random() < 0.5:
                shape = {"name": "a", "schema": schema}
                body["response_format"] = {"type": "json_schema", "json_schema": shape}
            await self.send("POST", CHAT, json=body)

        await self.side_by_side(8, work)

    async def attention(self) -> None:
        """What an answer attends to, scores by head and progress, of long prompts."""

        async def work(rng: Random) -> None:
            wanted = {"return_attention": True, "return_scores": "heads", "return_selection": True}
            body = {
                "model": "served",
                "prompt": text_of(rng, 6000),
                "max_tokens": 64,
                "ignore_eos": True,
                "n": 4,
                "filter": {"method": "sieve", **wanted},
                "stream": rng.random() < 0.5,
                "return_progress": True,
            }
            await self.send("POST", COMPLETIONS, json=body)

        await self.side_by_side(4, work)

    async def pdfs(self) -> None:
        """PDFs with a deep tree of pages, many pages, pages in a circle, and bombs."""
        files = self.files

        async def work(rng: Random) -> None:
            name = rng.choice(list(files))
            form = {"file": (f"{name}.pdf", files[name], "application/pdf")}
            reply = await self.send("POST", f"{DOCUMENTS}/text", files=form)
            if reply is not None:
                said = reply.json().get("error", {"message": "read"})["message"]
                self.told[name] = said if reply.status_code != 503 else self.told.get(name, said)
            if reply is None or reply.status_code == 503:
                await asyncio.sleep(0.2)

        await self.side_by_side(8, work)

    async def preflights(self) -> None:
        """HEAD, OPTIONS and paths that there are not, as fast as they are answered."""
        asked = {"Origin": "https://page.example", "Access-Control-Request-Method": "POST"}

        async def work(rng: Random) -> None:
            path = rng.choice(("/health", CHAT, "/v1/nothing", "/metrics", "/"))
            await self.send(rng.choice(("HEAD", "OPTIONS", "GET")), path, headers=asked)

        await self.side_by_side(16, work)


def new_id() -> str:
    return f"doc-{secrets.token_hex(16)}"


def hostile_pdfs() -> dict[str, bytes]:
    page = b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 9 9] /Contents 4 0 R >>"
    bomb = zlib.compress(b"BT (a) Tj ET " + b" " * (100 << 20), 1)
    for _ in range(2):
        bomb = zlib.compress(bomb, 9)
    filters = b"[/FlateDecode /FlateDecode /FlateDecode]"
    stream = b"<< /Length %d /Filter %s >>\nstream\n%s\nendstream"
    plain = b"<< /Length 2 >>\nstream\nBT\nendstream"
    tree = b"<< /Type /Pages /Kids [%d 0 R] /Count 1 >>"
    depth = 20_000
    return {
        "bomb": pdf([b"[3 0 R] /Count 1", page, stream % (len(bomb), filters, bomb)]),
        "many": pdf([b"[%s] /Count 100000" % (b"3 0 R " * 100_000), page, plain]),
        "said": pdf([b"[3 0 R] /Count 2147483647", page, plain]),
        "circle": pdf([b"[2 0 R] /Count 1", page, plain]),
        "deep": pdf([b"[5 0 R] /Count 1", page, plain, *(tree % (6 + i) for i in range(depth))]),
        "nested": pdf([b"[3 0 R] /Count 1", page[:-2] + b"/X " + b"[" * 200_000 + b">>", plain]),
        "not one": b"%PDF-1.7\n" + secrets.token_bytes(1 << 20),
    }


def pdf(objects: list[bytes]) -> bytes:
    """A PDF of these objects after its catalog; the first one is what follows /Kids."""
    whole = [b"<< /Type /Catalog /Pages 2 0 R >>", b"<< /Type /Pages /Kids " + objects[0] + b">>"]
    out, places = b"%PDF-1.7\n", []
    for number, each in enumerate([*whole, *objects[1:]], 1):
        places.append(len(out))
        out += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size = len(places) + 1
    end = b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (size, len(out))
    return out + b"xref\n0 %d\n0000000000 65535 f \n%s" % (size, table) + end


ATTACKS = (*("foreign", "timing", "churn", "constraints", "attention", "pdfs", "preflights"),)


async def attack(name: str, url: str, seconds: float, bobs: str) -> None:
    """Run in a process of its own. Prints what came of it as JSON."""
    limits = httpx.Limits(max_connections=64)
    files = hostile_pdfs() if name == "pdfs" else {}
    async with httpx.AsyncClient(base_url=url, headers=ALICE, timeout=120, limits=limits) as http:
        attacker = Attacker(http, seconds, bobs, files)
        await getattr(attacker, name)()
    print(json.dumps({"replies": dict(attacker.counts), "told": attacker.told}))


async def measure(server: ServeProcess, names: list[str], seconds: float) -> dict[str, Any]:
    async with httpx.AsyncClient(base_url=server.url, headers=BOB, timeout=120) as http:
        text = "The code for the lantern is 48213. " + text_of(Random(1), 400)
        stored = await http.post(DOCUMENTS, json={"text": text, "wait": True, "ttl": 7200})
        bobs = stored.raise_for_status().json()["id"]
        for seed in range(8):
            prompt = f"{text_of(Random(1000 + seed), 1500)}\n\nWhat is the code?"
            fields = {"prompt": prompt, "max_tokens": 1, "filter": {"method": "sieve"}}
            (await http.post(COMPLETIONS, json={"model": "served", **fields})).raise_for_status()
        expected = await stream_text(http, Seen())
        rows: dict[str, Any] = {}
        for name in ["alone", *names]:
            seen = Seen()
            process = None
            if name != "alone":
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, __file__, "--attack", name, "--url", server.url),
                    *("--seconds", str(seconds), "--bobs", bobs),
                    stdout=asyncio.subprocess.PIPE,
                )
            await watch(server, seen, expected, seconds + 2)
            rows[name] = seen.row()
            if process is not None:
                said, _ = await process.communicate()
                rows[name] |= json.loads(said)
            is_there = (await http.get(f"{DOCUMENTS}/{bobs}")).status_code == 200
            rows[name]["bobs_document_is_there"] = is_there
            print(f"{name}: {json.dumps(rows[name])}", file=sys.stderr, flush=True)
            for wrong in seen.wrong[:3]:
                print(f"wrong: {wrong!r}, expected {expected!r}", file=sys.stderr)
            await asyncio.sleep(3)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="ATTACK", help=f"of {', '.join(ATTACKS)}")
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--model", default="builtin")
    parser.add_argument("--kv-memory", default="256MiB")
    parser.add_argument("--attack", choices=ATTACKS, help=argparse.SUPPRESS)
    parser.add_argument("--url", help=argparse.SUPPRESS)
    parser.add_argument("--bobs", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.attack:
        asyncio.run(attack(given.attack, given.url, given.seconds, given.bobs))
        return
    if unknown := set(given.names) - set(ATTACKS):
        parser.error(f"ATTACK={min(unknown)}: must be one of {', '.join(ATTACKS)}")
    plain = {k: v for k, v in os.environ.items() if not k.startswith("GEMSERVE_")}
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("alice\nbob\n")
        options = [*SETTINGS, "--model", given.model, "--kv-memory", given.kv_memory]
        options += ["--api-key-file", str(keys)]
        server = ServeProcess(options, Path(folder) / "log", plain)
        try:
            server.wait_until_ready(READY_S)
            names = given.names or list(ATTACKS)
            rows = asyncio.run(measure(server, names, given.seconds))
            complaints = [
                line
                for line in server.log.read_text(errors="replace").splitlines()
                if re.search("Traceback|error|warning|event loop", line, re.IGNORECASE)
            ]
        finally:
            server.stop(60)
    print(json.dumps({"seconds": given.seconds, "complaints": complaints, "attacks": rows}))


if __name__ == "__main__":
    main()
