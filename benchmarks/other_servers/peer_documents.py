"""First and further questions about one document, beside other servers that cache beginnings.

Part of `peers.py`. Every server is started for this alone, gets the same prompts one at a time, and
is stopped. Its memory is that of all its processes: before the document, and after the last
question. transformers' continuous batching runs in a process of its own without HTTP.
"""

from __future__ import annotations

import json
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx

from benchmarks.other_servers.peer_servers import Contestant, Room, Server, Setup
from benchmarks.shared import results
from benchmarks.shared.streamed_chat import stream_chat

THINGS = ("violin", "lantern", "ladder", "compass", "kettle", "map", "anchor", "mirror")
CONTESTANTS = {
    contestant.name: contestant
    for contestant in (
        Contestant(
            "gemserve sieve",
            "gemserve-document-cache",
            {"filter": {"method": "sieve", "keep": 512}},
        ),
        Contestant("gemserve", "gemserve-document-cache", {"filter": {"method": "none"}}),
        Contestant("vllm prefix cache", "vllm-prefix-cache"),
    )
}
IN_PROCESS = "transformers prefix sharing"
NAMES = (*CONTESTANTS, IN_PROCESS)
_TIMEOUT_S = 1800.0
_ANSWER_TOKENS = 4
_GEMSERVE_KV_BYTES = 4 << 30  # the default of --kv-memory
_IN_PROCESS_SCRIPT = Path(__file__).with_name("peer_transformers.py")
Seen = dict[str, Any]


def measure(
    names: Sequence[str], documents: Sequence[str], setup: Setup, context: int, port: int
) -> list[Seen]:
    """A row for every contestant and document. `port`: a free one, for one server at a time."""
    rows: list[Seen] = []
    room = Room(2 * len(documents), context)  # the documents, and the questions about them
    for name in names:
        if name not in NAMES:
            continue
        results.note(f"documents: {name}")
        if name == IN_PROCESS:
            seen = _in_process(documents, setup.model, room)
        else:
            seen = _over_http(CONTESTANTS[name], documents, setup, room, port)
        for row in seen:
            rows.append({"measured": "document", "contestant": name, **row})
            results.note("")
            print(rows[-1], flush=True)
    return rows


def prompts_of(document: str) -> list[str]:
    return [f"{document}\n\nWhere is the {thing} kept?" for thing in THINGS]


def summary(asked: Sequence[Seen]) -> Seen:
    """Of the questions about one document in the order in which they were asked."""
    later_s = statistics.median(seen["ttft_s"] for seen in asked[1:])
    return {
        "prompt_tokens": asked[0]["prompt_tokens"],
        "first_s": asked[0]["ttft_s"],
        "second_s": asked[1]["ttft_s"],
        "later_s": later_s,
        "first_to_later": asked[0]["ttft_s"] / later_s,
        "cached_tokens": asked[-1]["cached_tokens"],
    }


def _over_http(
    contestant: Contestant, documents: Sequence[str], setup: Setup, room: Room, port: int
) -> list[Seen]:
    server = Server(contestant.server, setup, room, port)
    rows = []
    try:
        with server.running(), httpx.Client(base_url=server.url, timeout=_TIMEOUT_S) as http:
            _ask(http, contestant, setup.name, "Say hello. " * 100)  # warm-up
            for document in documents:
                before, cached_before = server.resident_bytes(), _cache_bytes(http)
                prompts = prompts_of(document)
                asked = [_ask(http, contestant, setup.name, prompt) for prompt in prompts]
                row = summary(asked)
                row["resident_bytes"] = server.resident_bytes()
                row["resident_growth"] = row["resident_bytes"] - before
                if cached_before is not None:
                    row["cache_bytes"] = (_cache_bytes(http) or 0) - cached_before
                rows.append(row)
    finally:
        server.stop()
    return rows


def _ask(http: httpx.Client, contestant: Contestant, model: str, prompt: str) -> Seen:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "max_tokens": _ANSWER_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
        **contestant.fields,
    }
    try:
        ttft_s, chunks = stream_chat(http, body)
    except RuntimeError as error:
        raise RuntimeError(f"{contestant.name}: {error}") from error
    usage = next(chunk["usage"] for chunk in reversed(chunks) if chunk.get("usage"))
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    return {"ttft_s": ttft_s, "prompt_tokens": usage["prompt_tokens"], "cached_tokens": cached}


def _cache_bytes(http: httpx.Client) -> int | None:
    """What gemserve's document cache holds, by its metrics; None for another server."""
    found = re.search(
        r"^gemserve_document_cache_usage_ratio (\S+)$", http.get("/metrics").text, re.MULTILINE
    )
    return None if found is None else round(float(found[1]) * _GEMSERVE_KV_BYTES)


def _in_process(documents: Sequence[str], model: str, room: Room) -> list[Seen]:
    """The rows that `peer_transformers.py` prints, or one with its last words."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.json"
        path.write_text(json.dumps([prompts_of(document) for document in documents]))
        options = ("--model", model, "--tokens", str(room.streams * room.context))
        done = subprocess.run(
            [sys.executable, str(_IN_PROCESS_SCRIPT), str(path), *options],
            capture_output=True,
            text=True,
            timeout=len(documents) * _TIMEOUT_S,
            check=False,
        )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines() or ["no output"]
        return [{"reason": f"exit status {done.returncode}: {lines[-1]}"}]
    rows: list[list[Seen]] = json.loads(done.stdout.splitlines()[-1])
    return [{**summary(asked), **asked[-1]["memory"]} for asked in rows]
