"""One chat over HTTP: when the first text of its answer came, and all that the stream had."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from typing import Any

import httpx


def stream_chat(http: httpx.Client, body: Mapping[str, Any]) -> tuple[float, list[dict[str, Any]]]:
    """Seconds to the first text, and the chunks. Of an answer without text, seconds to its end.

    Raises `RuntimeError` for an error, also for one amid the stream.
    """
    chunks: list[dict[str, Any]] = []
    ttft_s: float | None = None
    began_s = time.perf_counter()
    path = "/v1/chat/completions"
    with http.stream("POST", path, json={**body, "stream": True}) as reply:
        if reply.status_code != 200:
            raise RuntimeError(f"status {reply.status_code}: {reply.read().decode()}")
        for line in reply.iter_lines():
            at_s = time.perf_counter() - began_s
            if not line.startswith("data: {"):
                continue
            chunk = json.loads(line.removeprefix("data: "))
            if "error" in chunk:
                raise RuntimeError(str(chunk["error"]))
            chunks.append(chunk)
            if ttft_s is None and any(
                c["delta"].get("content") for c in chunk.get("choices") or ()
            ):
                ttft_s = at_s
    return time.perf_counter() - began_s if ttft_s is None else ttft_s, chunks
