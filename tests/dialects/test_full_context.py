"""A full context is refused in the words by which each protocol's clients shorten a conversation.

Coding agents compact when they read the code or these sentences, and give up at any other 400.
"""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gemserve.api.error_forms import ExceededContext
from gemserve.errors import AnswerTooLong, KeptTooLong, PromptTooLong
from tests.fakes import CHAT, COMPLETIONS, MODEL, Api, FakeCore, api_over

pytestmark = pytest.mark.anyio
Json = dict[str, Any]
CODE = "context_length_exceeded"
RESPONSES, MESSAGES, OLLAMA = "/v1/responses", "/v1/messages", "/api/chat"
CONTEXT = 3000
RULES = "Follow every rule of this house, whatever anybody says about it. "
# the first message is always read
PROTECTED: Json = {"filter": {"keep": 64, "protect": {"messages": [0]}}}
IN_SEGMENTS: Json = {"filter": {**PROTECTED["filter"], "window": 512}}


@pytest.fixture
async def api(tokenizer: Any) -> AsyncIterator[Api]:
    settings: Json = {"context_tokens": CONTEXT, "max_prompt_tokens": 2 * CONTEXT}
    async with api_over(FakeCore(), tokenizer, **settings) as opened:
        yield opened


def said(text: str, role: str = "user") -> Json:
    return {"messages": [{"role": role, "content": text}]}


async def refused(api: Api, path: str, **fields: Any) -> Any:
    reply = await api.client.post(path, json={"model": MODEL, **fields})
    assert reply.status_code == 400, reply.text
    return reply.json()["error"]


async def counted(api: Api, text: str, role: str = "user") -> int:
    chat = {"model": MODEL, **said(text, role), "add_generation_prompt": True}
    count: int = (await api.client.post("/tokenize", json=chat)).json()["count"]
    return count


async def test_a_chat_is_told_both_counts(api: Api) -> None:
    """It was `invalid_value`, in our own words."""
    tokens = await counted(api, "word " * 2000)
    for name in ("max_tokens", "max_completion_tokens"):
        fields = {**said("word " * 2000), "filter": "none", name: 2000}
        error = await refused(api, CHAT, **fields)
        assert (error["code"], error["param"]) == (CODE, name)
        assert error["message"] == (
            f"This model's maximum context length is {CONTEXT} tokens. However, you requested "
            f"{tokens + 2000} tokens ({tokens} in the messages, 2000 in the completion). Please "
            f"reduce the length of the messages or completion. {name}=2000: the context of "
            f"{CONTEXT} tokens leaves room for {CONTEXT - tokens} after the {tokens} of {tokens} "
            "prompt tokens that are kept"
        )


async def test_a_completion_is_told_both_counts(api: Api) -> None:
    fields: Json = {"prompt": [9] * 2000, "filter": "none", "max_tokens": 1001}
    error = await refused(api, COMPLETIONS, **fields)
    assert (error["code"], error["param"]) == (CODE, "max_tokens")
    assert error["message"].startswith(
        f"This model's maximum context length is {CONTEXT} tokens. However, you requested 3001 "
        "tokens (2000 in your prompt; 1001 for the completion). Please reduce your prompt; or "
        "completion length. max_tokens=1001: the context of"
    )


async def test_a_prompt_that_is_too_long_alone(api: Api) -> None:
    text = "word " * 3200
    tokens = await counted(api, text)
    told = f"This model's maximum context length is {CONTEXT} tokens. However, your prompt contains"
    left = "One token has to be left for the answer."
    error = await refused(api, CHAT, **said(text), filter="none")
    assert (error["code"], error["param"]) == (CODE, "messages")
    assert error["message"] == (
        f"{told} {tokens} input tokens. Please reduce the length of the messages. {left}"
    )
    error = await refused(api, COMPLETIONS, prompt=[9] * CONTEXT, filter="none")
    assert (error["code"], error["param"]) == (CODE, "prompt")
    assert error["message"] == (
        f"{told} {CONTEXT} input tokens. Please reduce the length of the prompt. {left}"
    )
    error = await refused(api, RESPONSES, input=text, filter="none", max_output_tokens=9)
    assert (error["code"], error["param"]) == (CODE, "input")
    assert error["message"] == (
        "Your input exceeds the context window of this model. Please adjust your input and try "
        f"again. {told} {tokens} input tokens. Please reduce the length of the input. {left}"
    )
    error = await refused(api, MESSAGES, **said(text), filter="none", max_tokens=9)
    assert error["message"] == f"prompt is too long: {tokens} tokens > {CONTEXT - 1} maximum"
    message = await refused(api, OLLAMA, **said(text), filter="none")
    over = tokens + 1 - CONTEXT
    assert message.startswith(
        f"prompt too long; exceeded max context length by {over} tokens. {told} {tokens} input"
    )


async def test_what_a_filter_keeps_is_too_long(api: Api) -> None:
    """Instructions beyond the context had our own sentence, which no client knows."""
    text = RULES * 200
    messages = [{"role": "system", "content": text}, {"role": "user", "content": "word " * 900}]
    error = await refused(api, CHAT, messages=messages, **IN_SEGMENTS)
    assert (error["code"], error["param"]) == (CODE, "messages")
    kept = re.search(r"contains (\d+) input tokens\. Please reduce .* messages\.", error["message"])
    assert kept is not None
    assert f"messages: the filter would keep {kept[1]} of " in error["message"]
    fields = {"system": text, "messages": messages[1:], "max_tokens": 9}
    error = await refused(api, MESSAGES, **fields, **IN_SEGMENTS)
    assert error["message"].startswith(
        f"prompt is too long: {kept[1]} tokens > {CONTEXT - 1} maximum. messages: the filter would"
    )
    error = await refused(api, RESPONSES, instructions=text, input="word " * 900, **IN_SEGMENTS)
    assert error["message"].startswith("Your input exceeds the context window of this model.")
    assert "length of the input. input: the filter would keep" in error["message"]


async def test_a_stored_document_makes_a_prompt_too_long(api: Api) -> None:
    stored = (await api.client.post("/v1/documents", json={"text": "word " * 2700})).json()
    part = {"type": "file", "file": {"file_id": stored["id"]}}
    messages = [{"role": "user", "content": [part, part]}]
    error = await refused(api, CHAT, messages=messages, filter="none")
    assert error["code"] == CODE
    assert "Please reduce the length of the messages." in error["message"]
    fields: Json = {"document": stored["id"], "prompt": "a", "filter": "none", "max_tokens": 400}
    error = await refused(api, COMPLETIONS, **fields)
    assert (error["code"], error["param"]) == (CODE, "max_tokens")


async def test_an_answer_of_ollama_s_is_too_long(api: Api) -> None:
    """`num_ctx` has no effect: the context is the server's."""
    fields = {**said("word"), "options": {"num_predict": CONTEXT, "num_ctx": 8 * CONTEXT}}
    message = await refused(api, OLLAMA, **fields)
    tokens = await counted(api, "word")
    assert message.startswith(f"prompt too long; exceeded max context length by {tokens} tokens.")
    assert f"options.num_predict={CONTEXT}: the context of {CONTEXT} tokens leaves" in message


async def test_output_beyond_the_context_is_lowered_where_clients_expect_it(api: Api) -> None:
    lowered: dict[str, Json] = {
        RESPONSES: {"input": "word", "max_output_tokens": CONTEXT},
        MESSAGES: {**said("word"), "max_tokens": CONTEXT},
    }
    for path, fields in lowered.items():
        reply = await api.client.post(path, json={"model": MODEL, **fields})
        assert reply.status_code == 200
        assert int(reply.headers["x-gemserve-max-tokens"]) < CONTEXT


def compacting(max_tokens: int) -> Json:
    """A conversation that is mostly instructions, and what it asks for at its end."""
    messages = [
        {"role": "system", "content": RULES * 140},
        {"role": "user", "content": "The old file says this and that. " * 25},
        {"role": "assistant", "content": "I have read it."},
        {"role": "user", "content": "Summarize our conversation."},
    ]
    return {"model": MODEL, "messages": messages, **PROTECTED, "max_tokens": max_tokens}


@pytest.mark.parametrize(("path", "num_tokens"), [(CHAT, 200), (MESSAGES, 200), (MESSAGES, 700)])
async def test_a_request_to_compact_is_filtered_where_it_does_not_fit(
    tokenizer: Any, path: str, num_tokens: int
) -> None:
    """Mostly instructions are read whole, because a filter costs more: then there was no room."""
    async with api_over(FakeCore(), tokenizer, context_tokens=8000, max_prompt_tokens=8000) as api:
        await api.client.post(path, json=compacting(9))
        (request,) = api.core.requests
        assert request.plan is not None
        assert request.plan.reason == "mostly_protected"
        tokens = len(request.prompt_ids)
    context = tokens + 50
    settings: Json = {"context_tokens": context, "max_prompt_tokens": context - 1}
    async with api_over(FakeCore(), tokenizer, **settings) as api:
        reply = await api.client.post(path, json=compacting(num_tokens))
        assert reply.status_code == 200, reply.text
        (request,) = api.core.requests
        assert request.plan is not None
        assert request.plan.reason is None
        assert request.plan.num_kept + request.sampling.max_tokens <= context
        assert request.sampling.max_tokens == min(num_tokens, context - request.plan.num_kept)


async def test_instructions_that_fill_the_context_do_not_keep_a_filter_from_it(
    tokenizer: Any,
) -> None:
    """A prompt longer than the context was refused, although what is kept of it fits."""
    settings: Json = {"context_tokens": 2950, "max_prompt_tokens": 9000}
    async with api_over(FakeCore(), tokenizer, **settings) as api:
        reply = await api.client.post(CHAT, json={**compacting(9), **IN_SEGMENTS})
        assert reply.status_code == 200, reply.text
        (request,) = api.core.requests
        assert len(request.prompt_ids) > 2950


@pytest.mark.parametrize(
    ("error", "counts"),
    [
        (PromptTooLong(tokens=9, limit=7, param="messages"), (7, 7, 9, None, "")),
        (PromptTooLong(tokens=9, limit=7, param="prompt", is_least=True), (7, 7, 9, None, "")),
        (PromptTooLong(tokens=9, limit=7, param="messages", leaves_one=True), (8, 7, 9, None, "")),
        (
            KeptTooLong(tokens=90, kept=9, protected=0, limit=7, param="messages", note=" with x"),
            (8, 7, 9, None, " with x"),
        ),
        *(
            (
                AnswerTooLong(
                    tokens=90, read=9, max_tokens=4, context=12, param="max_tokens", place=place
                ),
                (12, 12, 9, 4, ""),
            )
            for place in ("messages", "prompt", "prompt.3")
        ),
    ],
    ids=str,
)
def test_the_counts_can_be_read_from_the_message(error: Any, counts: tuple[Any, ...]) -> None:
    """The process that words an error for a protocol may be another than that which raised it."""
    found = ExceededContext.find({"code": error.code, "message": str(error)})
    assert found is not None
    assert (found.context, found.longest, found.prompt, found.answer, found.note) == counts


async def test_a_streamed_response_fails_with_the_code(api: Api) -> None:
    """Codex shortens a conversation when it reads this event, and gives up at a status of 400."""
    body = {"model": MODEL, "input": "word " * 3200, "stream": True}
    reply = await api.client.post(RESPONSES, json=body)
    assert reply.status_code == 200
    events = [json.loads(line[6:]) for line in reply.text.splitlines() if line.startswith("data: ")]
    assert [event["type"] for event in events] == ["response.created", "response.failed"]
    assert [event["sequence_number"] for event in events] == [0, 1]
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", CODE)
    whole = await refused(api, RESPONSES, **{**body, "stream": False})
    assert failed["error"]["message"] == whole["message"]
