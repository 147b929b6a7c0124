"""Many mixed requests over HTTP: each gets what it would have got alone, and who leaves is free.

`GEMSERVE_TEST_REQUESTS=200` runs the full size; the default keeps the suite quick.
"""

from __future__ import annotations

import asyncio
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from gemserve.api.serving import build_serving
from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request
from gemserve.engine.build import build_core
from gemserve.engine.core import Core
from gemserve.prompting.protected import QUESTION_TAIL
from tests import models
from tests.e2e.test_concurrency import CONFIG, Answer, first_difference_is_a_tie, mixed_requests
from tests.fakes import COMPLETIONS, data_of, live_server, parse_metrics, text_of

REQUESTS = int(os.environ.get("GEMSERVE_TEST_REQUESTS", "24"))
LONGEST = 8192
EOS = 2
MODEL = "tiny"
Json = dict[str, Any]
Metrics = dict[str, float]


@dataclass(frozen=True, slots=True)
class Reply:
    """One complete reply, streamed or whole."""

    text: str
    reason: str
    usage: dict[str, int]
    filter: Json

    def answer(self) -> Answer:
        """In the engine's terms: a word is a token, and to stop is to draw EOS."""
        tokens = [int(word.removeprefix("t")) for word in self.text.split()]
        if self.reason == "stop":
            tokens.append(EOS)
        assert len(tokens) == self.usage["completion_tokens"]
        return Answer(report=FilterReport(**self.filter), tokens=tokens)


def save(model: Any, directory: Path) -> Path:
    """A checkpoint whose tokenizer loses nothing: token 17 is "t17 ", and none is special."""
    from tokenizers import Tokenizer, decoders
    from tokenizers.models import WordLevel

    model.save_pretrained(directory)
    words = {f"t{i} ": i for i in range(models.VOCAB)}
    backend = Tokenizer(WordLevel(words, unk_token="t0 "))
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(directory)
    return directory


@contextmanager
def served(model: Any, directory: Path, config: EngineConfig) -> Iterator[tuple[str, Core]]:
    """A live server of `model`, with room for the longest prompt's answer; its URL and core."""
    model.config.max_position_embeddings = 2 * LONGEST
    checkpoint = ModelConfig(model=str(save(model, directory)), device="cpu", dtype="float32")
    core = build_core(checkpoint, config)
    with live_server(build_serving(core, model_name=MODEL, config=ServerConfig())) as url:
        yield url, core


def client_of(url: str) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=None)
    return httpx.AsyncClient(base_url=url, timeout=None, limits=limits)


def body_of(request: Request, stream: bool) -> Json:
    body: Json = {
        "model": MODEL,
        "prompt": request.prompt_ids,
        "max_tokens": request.sampling.max_tokens,
        "temperature": 0,
        "stream": stream,
        "filter": {
            "method": request.filter.method,
            # the tail is kept whatever its scores: the rest is what is chosen
            "keep": int(request.filter.keep) + QUESTION_TAIL,
            "return_selection": True,
        },
    }
    return {**body, "stream_options": {"include_usage": True}} if stream else body


async def ask(client: httpx.AsyncClient, body: Json, patience_s: float | None) -> Reply | None:
    """The reply, or None if the client left before it was complete."""
    try:
        async with asyncio.timeout(patience_s):
            reply = await client.post(COMPLETIONS, json=body)
    except TimeoutError:
        return None
    assert reply.status_code == 200, reply.text
    return read_stream(reply) if body["stream"] else read_whole(reply)


def read_whole(reply: httpx.Response) -> Reply:
    content = reply.json()
    [choice] = content["choices"]
    return Reply(choice["text"], choice["finish_reason"], content["usage"], content["filter"])


def read_stream(reply: httpx.Response) -> Reply:
    """Every event in its place: the report, text, one end, usage, and one `[DONE]`."""
    chunks = data_of(reply)
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    assert [i for i, reason in enumerate(reasons) if reason is not None] == [len(chunks) - 2]
    assert [i for i, chunk in enumerate(chunks) if "filter" in chunk] == [0]
    assert [i for i, chunk in enumerate(chunks) if chunk["usage"]] == [len(chunks) - 1]
    assert len({chunk["id"] for chunk in chunks}) == 1
    return Reply(text_of(chunks), reasons[-1], chunks[-1]["usage"], chunks[0]["filter"])


async def metrics_once(
    client: httpx.AsyncClient, condition: Callable[[Metrics], bool], timeout_s: float
) -> Metrics:
    """The first metrics that satisfy `condition`, which must be within `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while True:
        seen = parse_metrics((await client.get("/metrics")).text)
        assert time.monotonic() < deadline, seen
        if condition(seen):
            return seen
        await asyncio.sleep(0.01)


def is_free(metrics: Metrics) -> bool:
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_ratio")
    return all(metrics[name] == 0 for name in names)


@pytest.mark.anyio
@pytest.mark.timeout(600)
async def test_mixed_requests_over_http_answer_as_if_alone(tmp_path: Path) -> None:
    rng = random.Random(0)
    requests = mixed_requests(rng, REQUESTS)
    starts_s = [rng.random() * 0.5 for _ in requests]
    # from a hundredth of a second to longer than they all take
    patiences_s = {
        i: 0.01 * (20 * REQUESTS) ** rng.random()
        for i in rng.sample(range(REQUESTS), REQUESTS // 4)
    }

    async def late(client: httpx.AsyncClient, index: int) -> Reply | None:
        await asyncio.sleep(starts_s[index])
        body = body_of(requests[index], stream=index % 2 == 0)
        return await ask(client, body, patiences_s.get(index))

    config = replace(CONFIG, max_queue=REQUESTS)
    with served(models.build("llama"), tmp_path, config) as (url, core):
        async with client_of(url) as client:
            replies = await asyncio.wait_for(
                asyncio.gather(*(late(client, i) for i in range(REQUESTS))), timeout=280
            )
            ended = await metrics_once(client, is_free, 2.0)
            core.check_integrity()
            complete = {i: reply for i, reply in enumerate(replies) if reply is not None}
            check_ends(complete, set(patiences_s), ended)
            different = 0
            for index, seen in complete.items():
                alone = await ask(client, body_of(requests[index], stream=False), None)
                assert alone is not None
                different += differs(core, requests[index], alone, seen)
            assert different <= REQUESTS // 100


def check_ends(complete: dict[int, Reply], leavers: set[int], metrics: Metrics) -> None:
    """Who stayed was answered; the server counted one end for each request, and no error."""
    assert set(range(REQUESTS)) - set(complete) <= leavers
    assert len(complete) <= REQUESTS - len(leavers) // 4  # else nobody has left
    counted = {
        reason: metrics.get(f'request_success_total{{finish_reason="{reason}"}}', 0)
        for reason in ("stop", "length", "abort", "error")
    }
    assert counted["error"] == 0
    assert counted["stop"] + counted["length"] >= len(complete)
    assert sum(counted.values()) <= REQUESTS


def differs(core: Core, request: Request, alone: Reply, seen: Reply) -> bool:
    """Is the answer another than alone? It may be, where two tokens were equally likely."""
    assert seen.reason in ("stop", "length")
    assert seen.usage["prompt_tokens"] == len(request.prompt_ids)
    # what others have left in the document cache changes the work, not the answer
    work = {"filter_ms": 0, "cached_tokens": 0}
    assert {**seen.filter, **work} == {**alone.filter, **work}
    ours, theirs = alone.answer(), seen.answer()
    if ours.tokens == theirs.tokens:
        assert (alone.text, alone.reason) == (seen.text, seen.reason)
        return False
    assert first_difference_is_a_tie(core, request, ours, theirs)
    return True


@pytest.mark.anyio
async def test_leaving_while_the_prompt_is_filtered_frees_its_memory(tmp_path: Path) -> None:
    """Within a second, of a filter pass that would take several."""
    torch.manual_seed(0)
    layers = 16
    model = AutoModelForCausalLM.from_config(
        LlamaConfig(
            vocab_size=models.VOCAB,
            hidden_size=256,
            intermediate_size=512,
            num_hidden_layers=layers,
            num_attention_heads=8,
            num_key_value_heads=2,
        ),
        dtype=torch.float32,
    )
    config = EngineConfig(kv_memory_bytes=128 << 20, filter_layer=layers - 1)
    rng = random.Random(0)
    prompt = [rng.randrange(6, models.VOCAB) for _ in range(LONGEST)]
    with served(model, tmp_path, config) as (url, core):
        async with client_of(url) as client:
            for already_left, stream in enumerate((True, False)):
                body = {"model": MODEL, "prompt": prompt, "filter": "sieve", "stream": stream}
                asking = asyncio.create_task(client.post(COMPLETIONS, json=body))
                await metrics_once(client, is_filtering, 30.0)
                await asyncio.sleep(0.2)  # into steps of full length
                await metrics_once(client, is_filtering, 1.0)
                asking.cancel()
                await asyncio.wait([asking])
                assert asking.cancelled()
                await metrics_once(client, is_free, 1.0)
                await metrics_once(client, lambda m, n=already_left: has_left(m, n + 1), 1.0)
                core.check_integrity()


def is_filtering(metrics: Metrics) -> bool:
    assert metrics["kept_prompt_tokens_total"] == 0
    return metrics["num_requests_running"] == 1 and metrics["kv_cache_usage_ratio"] > 0


def has_left(metrics: Metrics, count: int) -> bool:
    assert metrics["kept_prompt_tokens_total"] == 0  # no filter pass came to its end
    return metrics.get('request_success_total{finish_reason="abort"}') == count
