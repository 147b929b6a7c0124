"""Progress of a long prompt through the clients of Anthropic and OpenAI, as they are published."""

from __future__ import annotations

from pathlib import Path

import pytest

from gemserve.engine.sequence.progress import Progress
from tests.clients.environments import python_of
from tests.fakes import FILTERED, FakeCore
from tests.guide import run_example

READING = Progress(phase="filter", tokens=20, total=100, cached=10, eta_s=1.5)
SCRIPT = (READING, 0.6, FILTERED, "Beside ", 0.3, "the ", "door.")
ANTHROPIC = """
import asyncio
import anthropic

ASKED = {"model": "builtin", "max_tokens": 30, "messages": [{"role": "user", "content": "Where?"}]}
PROGRESS = {"stream_options": {"include_progress": True}}
where = {"base_url": "http://127.0.0.1:8000", "api_key": "none", "max_retries": 0}
client = anthropic.Anthropic(**where)
events = list(client.messages.create(**ASKED, stream=True, extra_body=PROGRESS))
kinds = [event.type for event in events]
assert (kinds[0], kinds[-1]) == ("message_start", "message_stop"), kinds
assert "ping" not in kinds  # it skips them, whatever is in them
parts = [event.delta.text for event in events if event.type == "content_block_delta"]
assert "".join(parts) == TEXT
with client.messages.stream(**ASKED, extra_body=PROGRESS) as stream:
    assert "".join(stream.text_stream) == TEXT
    final = stream.get_final_message()
assert (final.content[0].text, final.usage.output_tokens) == (TEXT, 3)

async def ask():
    async with anthropic.AsyncAnthropic(**where) as other:
        async with other.messages.stream(**ASKED, extra_body=PROGRESS) as stream:
            return await stream.get_final_text()

assert asyncio.run(ask()) == TEXT
with client.messages.with_streaming_response.create(
    **ASKED, stream=True, extra_body=PROGRESS
) as reply:
    lines = list(reply.iter_lines())
assert any('"tokens":20' in line.replace(" ", "") for line in lines), lines
"""
OPENAI = """
import asyncio
import openai

USER = {"role": "user", "content": "Where?"}
PROGRESS = {"stream_options": {"include_progress": True, "include_usage": True}}
where = {"base_url": "http://127.0.0.1:8000/v1", "api_key": "none", "max_retries": 0}
client = openai.OpenAI(**where)
ASKED = {"model": "builtin", "messages": [USER], **PROGRESS}

def check(chunks):
    told = [chunk.model_extra["progress"] for chunk in chunks if "progress" in chunk.model_extra]
    assert {"phase": "filter", "tokens": 20, "total": 100, "eta_ms": 1500} in told, told
    parts = [each.choices[0].delta.content or "" for each in chunks if each.choices]
    assert "".join(parts) == TEXT
    assert chunks[-1].usage.completion_tokens == 3

check(list(client.chat.completions.create(**ASKED, stream=True)))
with client.chat.completions.stream(**ASKED) as stream:
    check([event.chunk for event in stream if event.type == "chunk"])
    final = stream.get_final_completion()
assert final.choices[0].message.content == TEXT
assert final.usage.completion_tokens == 3

async def ask():
    async with openai.AsyncOpenAI(**where) as other:
        return [chunk async for chunk in await other.chat.completions.create(**ASKED, stream=True)]

check(asyncio.run(ask()))
legacy = client.completions.create(model="builtin", prompt="Where?", stream=True, **PROGRESS)
assert "".join(chunk.choices[0].text for chunk in legacy if chunk.choices) == TEXT
with client.responses.stream(model="builtin", input="Where?", extra_body=PROGRESS) as events:
    told = [event.model_extra.get("progress") for event in events]
    assert events.get_final_response().output_text == TEXT
assert {"phase": "filter", "tokens": 20, "total": 100, "eta_ms": 1500} in told, told
"""


@pytest.mark.parametrize(
    ("environment", "code"),
    [("anthropic", ANTHROPIC), ("agents", OPENAI)],
    ids=["anthropic", "openai"],
)
def test_progress_breaks_no_stream(
    url: str, folder: Path, core: FakeCore, environment: str, code: str
) -> None:
    """A client that fails at what it does not know would lose the answer."""
    core.script = SCRIPT
    text = f"TEXT = 'Beside the door.'\n{code}"
    run_example(text, "python", url=url, folder=folder, interpreter=python_of(environment))
