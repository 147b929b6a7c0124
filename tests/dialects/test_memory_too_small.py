"""A request that no memory is left for says so in its own fields, and what to do about it."""

from __future__ import annotations

from typing import Any

import pytest

from gemserve.contract.requests import Request
from gemserve.errors import CapacityExceeded
from tests.fakes import CHAT, COMPLETIONS, MODEL, FakeCore, api_over

pytestmark = pytest.mark.anyio
Json = dict[str, Any]
SAID: Json = {"messages": [{"role": "user", "content": "Hello there"}]}


class SmallCore(FakeCore):
    """Has less KV memory than any request needs."""

    def check(self, request: Request) -> None:
        raise CapacityExceeded(
            tokens=len(request.prompt_ids),
            kept=len(request.prompt_ids),
            max_tokens=request.sampling.max_tokens,
            needed_bytes=2000,
            limit_bytes=1000,
        )


# the field with the prompt, and the one with the length of the answer
NAMED: list[tuple[str, Json, str, str | None]] = [
    (COMPLETIONS, {"prompt": "Hello"}, "prompt", "max_tokens"),
    (CHAT, SAID, "messages", "max_tokens"),
    (CHAT, {**SAID, "max_completion_tokens": 9}, "messages", "max_completion_tokens"),
    (CHAT, {**SAID, "stream": True}, "messages", "max_tokens"),
    ("/v1/responses", {"input": "Hello"}, "input", "max_output_tokens"),
    ("/v1/messages", {**SAID, "max_tokens": 9}, "messages", "max_tokens"),
    ("/api/chat", SAID, "messages", "options.num_predict"),
    ("/api/generate", {"prompt": "Hello"}, "prompt", "options.num_predict"),
    ("/v1/filter", {"prompt": "Hello"}, "prompt", None),
    ("/v1/filter", SAID, "messages", None),
    ("/v1/documents", {"text": "Hello"}, "text", None),
]


@pytest.mark.parametrize(("path", "fields", "prompt", "answer"), NAMED)
async def test_the_fields_that_were_sent_are_named(
    tokenizer: Any, path: str, fields: Json, prompt: str, answer: str | None
) -> None:
    """Every protocol was told of `prompt` and `max_tokens`, and none what to do."""
    async with api_over(SmallCore(), tokenizer) as api:
        reply = await api.client.post(path, json={"model": MODEL, **fields})
    assert reply.status_code == 400
    error = reply.json()["error"]
    message = error if isinstance(error, str) else error["message"]
    if "code" in error:
        assert (error["code"], error["param"]) == ("kv_memory_exceeded", prompt)
    assert message.startswith(f"{prompt}: a prompt of ")
    assert (
        "needs 2000 bytes of KV memory at its peak; this server has 1000 (--kv-memory)." in message
    )
    lower = f", lower {answer}" if answer else ""
    assert message.endswith(
        f"Shorten {prompt}{lower}, or have less of it kept (filter.keep); whoever runs the server "
        "can give it more memory."
    )
    assert (answer is None) == ("with " not in message)
    if answer is not None:
        assert f" with {answer}=" in message
