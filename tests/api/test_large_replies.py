"""A reply with many log-probabilities is built beside the event loop, not on it."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest

from gemserve.api.replies import large_replies
from gemserve.api.replies.chat_format import ChatFormat
from gemserve.api.replies.large_replies import MAX_ON_LOOP, to_json
from gemserve.api.replies.server_sent_events import data_event
from gemserve.contract.events import PromptScored, TokenLogprob
from tests.fakes import CHAT, COMPLETIONS, FILTERED, FakeCore, api_over, data_of

pytestmark = pytest.mark.anyio
NUM_TOKENS = 900


@pytest.fixture
def builders(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The threads in which log-probabilities are written."""
    threads: list[str] = []
    write = "gemserve.api.replies.logprobs.CompletionLogprobWriter.write"
    original = large_replies._json_parts

    from gemserve.api.replies.logprobs import CompletionLogprobWriter

    written = CompletionLogprobWriter.write

    def writing(self: Any, tokens: Any) -> Any:
        threads.append(threading.current_thread().name)
        return written(self, tokens)

    def dumping(content: Any) -> Any:
        threads.append(threading.current_thread().name)
        return original(content)

    monkeypatch.setattr(write, writing)
    monkeypatch.setattr(large_replies, "_json_parts", dumping)
    return threads


@pytest.mark.parametrize("stream", [False, True])
async def test_the_event_loop_builds_no_large_reply(
    tokenizer: Any, builders: list[str], stream: bool
) -> None:
    """Twenty alternatives of 30,000 echoed tokens kept /health waiting for five seconds."""
    scored = TokenLogprob(9, -1.5, ((9, -1.5), (10, -2.0)))
    core = FakeCore(FILTERED, PromptScored(logprobs=(scored,) * (NUM_TOKENS - 1)), "a")
    async with api_over(core, tokenizer) as api:
        fields = {"prompt": [9] * NUM_TOKENS, "echo": True, "logprobs": 2, "max_tokens": 1}
        reply = await api.post(COMPLETIONS, **fields, stream=stream)
        assert reply.status_code == 200
        parts = data_of(reply) if stream else [reply.json()]
        found = [p["choices"][0]["logprobs"] for p in parts if p["choices"][0]["logprobs"]]
        assert len(found[0]["tokens"]) == NUM_TOKENS
        assert found[0]["top_logprobs"][1]
    loop = threading.current_thread().name
    assert len(builders) == 2
    assert loop not in builders


async def test_a_long_answer_is_taken_apart_beside_the_event_loop(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """50,000 characters, each of which might have begun a call, held it for 0.45 s."""
    threads: list[str] = []
    choice = ChatFormat.choice

    def taking_apart(*given: Any) -> Any:
        threads.append(threading.current_thread().name)
        return choice(*given)

    monkeypatch.setattr(ChatFormat, "choice", taking_apart)
    async with api_over(FakeCore(FILTERED, "<" * 20 * MAX_ON_LOOP), tokenizer) as api:
        reply = await api.post(CHAT)
    assert reply.json()["choices"][0]["message"]["content"] == "<" * 20 * MAX_ON_LOOP
    assert threads != [threading.current_thread().name]


def test_a_large_reply_is_the_same_json() -> None:
    content = {"a": [1.5, None, True, 'é\n"<'], "b": {"c": [], "d": {}}}
    small = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
    assert to_json(content, 0) == to_json(content, MAX_ON_LOOP + 1) == small


@pytest.mark.parametrize("num_scored", [0, MAX_ON_LOOP + 1])
def test_an_event_is_one_line_for_readers_that_cut_at_more_than_newlines(num_scored: int) -> None:
    """LiteLLM, which reads with httpx's lines, got pieces of JSON."""
    content = {"t": "a\u2028b\u2029c\x85d 漢字", "e": "\\u2028"}
    data, *rest = data_event(content, num_scored=num_scored).splitlines()
    assert rest == [""]
    assert json.loads(data.removeprefix("data: ")) == content
