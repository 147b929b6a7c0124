"""Log-probabilities on the wire are those of the model read whole by transformers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

from gemserve.api.app import create_app
from gemserve.api.serving import build_serving
from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve.engine.build import build_core
from gemserve.model.loading.loader import BUILTIN_PATH
from tests.fakes import CHAT, COMPLETIONS, data_of

pytestmark = pytest.mark.anyio
PROMPT = "The code of Zoë is 48213. What is the code? 🌍"


@pytest.fixture
async def client() -> AsyncIterator[httpx.AsyncClient]:
    core = build_core(ModelConfig(), EngineConfig(kv_memory_bytes=64 << 20))
    serving = build_serving(core, model_name="builtin", config=ServerConfig())
    transport = httpx.ASGITransport(create_app(serving))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as opened:
            yield opened
    finally:
        serving.engine.stop()


async def post(client: httpx.AsyncClient, path: str, **fields: Any) -> httpx.Response:
    return await client.post(path, json={"model": "builtin", "temperature": 0, **fields})


def expected_logprobs(ids: list[int]) -> torch.Tensor:
    """Of each next token: [tokens, vocab]."""
    model = AutoModelForCausalLM.from_pretrained(BUILTIN_PATH).eval()
    with torch.inference_mode():
        logits: torch.Tensor = model(torch.tensor([ids])).logits[0].float()
    return logits.log_softmax(-1)


async def test_echo_scores_every_token_of_the_prompt(
    client: httpx.AsyncClient, tokenizer: Any
) -> None:
    ids = tokenizer(PROMPT * 30)["input_ids"]  # several chunks
    body = (
        await post(
            client, COMPLETIONS, prompt=ids, echo=True, logprobs=2, max_tokens=3, ignore_eos=True
        )
    ).json()
    (choice,) = body["choices"]
    found = choice["logprobs"]
    assert body["filter"]["reason"] == "prompt_logprobs"
    assert len(found["tokens"]) == len(ids) + 3
    assert found["token_logprobs"][0] is None
    assert found["top_logprobs"][0] is None
    expected = expected_logprobs(ids)
    own = expected[:-1].gather(-1, torch.tensor(ids[1:])[:, None])[:, 0]
    torch.testing.assert_close(
        torch.tensor(found["token_logprobs"][1 : len(ids)]), own, atol=1e-3, rtol=1e-3
    )
    first_drawn = found["token_logprobs"][len(ids)]
    assert first_drawn == pytest.approx(float(expected[-1].max()), abs=1e-3)
    for logprob, top in zip(found["token_logprobs"][1:], found["top_logprobs"][1:], strict=True):
        assert logprob in top.values()
        assert len(top) in (2, 3)


async def test_offsets_point_into_the_text(client: httpx.AsyncClient) -> None:
    fields = {"prompt": PROMPT, "echo": True, "logprobs": 0, "max_tokens": 4}
    (choice,) = (await post(client, COMPLETIONS, **fields)).json()["choices"]
    text, found = choice["text"], choice["logprobs"]
    assert text.startswith(PROMPT)
    for token, offset in zip(found["tokens"], found["text_offset"], strict=True):
        if not token.startswith(("bytes:", "<")):
            assert text[offset : offset + len(token)] == token
    assert any(token.startswith("bytes:\\x") for token in found["tokens"])  # of the emoji


async def test_special_tokens_that_are_spelled_out_count(client: httpx.AsyncClient) -> None:
    fields = {"prompt": "a<|end|>b c", "echo": True, "logprobs": 0, "max_tokens": 2}
    (choice,) = (await post(client, COMPLETIONS, **fields)).json()["choices"]
    found = choice["logprobs"]
    places = dict(zip(found["tokens"], found["text_offset"], strict=True))
    assert (places["a"], places["<|end|>"], places["b"], places[" c"]) == (0, 1, 8, 9)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_stream_says_what_a_whole_reply_says(client: httpx.AsyncClient, path: str) -> None:
    fields: dict[str, Any] = {"logprobs": 3, "prompt": PROMPT, "echo": True}
    if path == CHAT:
        messages = [{"role": "user", "content": PROMPT}]
        fields = {"logprobs": True, "top_logprobs": 3, "messages": messages}
    fields |= {"max_tokens": 12, "ignore_eos": True}
    (whole,) = (await post(client, path, **fields)).json()["choices"]
    parts = data_of(await post(client, path, stream=True, **fields))
    streamed: dict[str, list[Any]] = {}
    for chunk in parts:
        for name, entries in (chunk["choices"][0]["logprobs"] or {}).items():
            streamed[name] = streamed.get(name, []) + (entries or [])
    expected = {name: entries or [] for name, entries in whole["logprobs"].items()}
    assert streamed == expected
    if path == CHAT:
        assert len(expected["content"]) == 12
        assert all(len(entry["top_logprobs"]) == 3 for entry in expected["content"])
        said = b"".join(bytes(entry["bytes"]) for entry in expected["content"])
        assert said.decode(errors="ignore").strip() != ""


async def test_logprobs_of_a_filtered_prompt_are_of_what_was_kept(
    client: httpx.AsyncClient,
) -> None:
    # no choice is trusted in a text that repeats itself: the default would read all of it
    chosen = {"keep": 256, "fallback": False}
    fields = {"prompt": PROMPT * 200, "logprobs": 1, "max_tokens": 2, "filter": chosen}
    body = (await post(client, COMPLETIONS, **fields)).json()
    assert body["filter"]["applied"]
    assert len(body["choices"][0]["logprobs"]["tokens"]) == body["usage"]["completion_tokens"]


async def test_without_being_asked_there_are_none(client: httpx.AsyncClient) -> None:
    (choice,) = (await post(client, COMPLETIONS, prompt="Hi", max_tokens=2)).json()["choices"]
    assert choice["logprobs"] is None
