"""What a stream's bytes add up to: the whole reply's text, whatever is cut where.

`GEMSERVE_TEST_SEEDS=500` runs the full size; the default keeps the suite quick.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from gemserve.api.serving import build_serving
from gemserve.config import EngineConfig, ServerConfig
from gemserve.model.passes.causal_model import CausalModel
from tests import models
from tests.cores import core_over
from tests.fakes import CHAT, COMPLETIONS, data_of, live_server, text_of

pytestmark = pytest.mark.anyio
SEEDS = int(os.environ.get("GEMSERVE_TEST_SEEDS", "60"))
EOS = 2
TEXT = "🌍é abSTOP"


@pytest.fixture(scope="module")
def url(tokenizer: Any) -> Any:
    """A random model, which draws of a few tokens any as likely as the others."""
    config = EngineConfig(
        kv_memory_bytes=64 << 20, filter_layer=1, max_prompt_tokens=1000, max_queue=1000
    )
    model = CausalModel(models.build("llama"))
    core = core_over(model=model, tokenizer=tokenizer, config=config, eos_ids=frozenset({EOS}))
    serving = build_serving(core, model_name="random", config=ServerConfig())
    with live_server(serving) as address:
        yield address


@pytest.fixture
async def client(url: str) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=url, timeout=60) as opened:
        yield opened


def body_for(path: str, tokenizer: Any, seed: int, **fields: Any) -> dict[str, Any]:
    """Draws single bytes of emoji and letters, mostly in an order that makes no character."""
    alphabet = {token for character in TEXT for token in byte_tokens(tokenizer, character)}
    prompt: dict[str, Any] = {"prompt": f"Say {seed}"}
    if path == CHAT:
        prompt = {"messages": [{"role": "user", "content": f"Say {seed}"}]}
    return {
        "model": "random",
        "seed": seed,
        "max_tokens": 24,
        "temperature": 1,
        "logit_bias": {str(token): 100 for token in (*alphabet, EOS)},
        **prompt,
        **fields,
    }


def byte_tokens(tokenizer: Any, character: str) -> list[int]:
    pieces = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str(character)
    ids: list[int] = [
        tokenizer.convert_tokens_to_ids(byte) for piece, _ in pieces for byte in piece
    ]
    assert None not in ids
    return ids


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_stream_adds_up_to_the_whole_reply(
    client: httpx.AsyncClient, tokenizer: Any, path: str
) -> None:
    """Emoji split across tokens, bytes that make no character, stop strings across tokens."""
    limit = asyncio.Semaphore(8)
    seen: list[str] = []

    async def compare(seed: int) -> None:
        stop = {"stop": ["ab", "🌍é"]} if seed % 3 == 0 else {}
        body = body_for(path, tokenizer, seed, **stop)
        async with limit:
            whole = (await client.post(path, json=body)).json()
            reply = await client.post(path, json={**body, "stream": True})
        chunks = data_of(reply)
        assert text_of(chunks) == text_of([whole])
        assert not any(s in text_of(chunks) for s in stop.get("stop", ()))
        (choice,) = whole["choices"]
        assert chunks[-1]["choices"][0]["finish_reason"] == choice["finish_reason"]
        assert "usage" not in chunks[-1]
        seen.append(text_of([whole]))

    async with asyncio.TaskGroup() as group:
        for seed in range(SEEDS):
            group.create_task(compare(seed))
    assert len(seen) == SEEDS
    assert any(character in text for text in seen for character in "é🌍")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("asked", [None, False, True])
async def test_usage_comes_once_and_only_if_asked_for(
    client: httpx.AsyncClient, tokenizer: Any, path: str, asked: bool | None
) -> None:
    options = {} if asked is None else {"stream_options": {"include_usage": asked}}
    body = body_for(path, tokenizer, 1, stream=True, **options)
    chunks = data_of(await client.post(path, json=body))
    with_usage = [c for c in chunks if c.get("usage") is not None]
    if asked:
        assert with_usage == [chunks[-1]]
        assert chunks[-1]["choices"] == []
        assert all("usage" in chunk for chunk in chunks)
    else:
        assert all("usage" not in chunk for chunk in chunks)


async def test_every_event_is_whole_utf_8(client: httpx.AsyncClient, tokenizer: Any) -> None:
    """As bytes on the socket: no event is cut inside a character, each is one line of JSON."""
    body = body_for(COMPLETIONS, tokenizer, 5, stream=True, ignore_eos=True)
    received = b""
    async with client.stream("POST", COMPLETIONS, json=body) as reply:
        async for part in reply.aiter_raw():
            received += part
    events = received.split(b"\n\n")
    assert events.pop() == b""
    assert events.pop() == b"data: [DONE]"
    for event in events:
        assert event.startswith(b"data: ")
        json.loads(event.removeprefix(b"data: ").decode())
