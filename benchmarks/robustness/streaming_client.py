"""Streams answers with one of the official clients, all at once: a program for `replica_killed.py`.

It runs in the environment of its client, so it imports nothing of this repository. Its argument is
`openai` or `anthropic`, and its standard input one JSON object: `url`, and `jobs` with `number`,
`prompt` and `max_tokens`. It prints a JSON line when a stream's first text comes, and one when the
stream has ended. Times are of the machine's monotonic clock.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

# messages cannot ignore the model's end, so that their answers are held to a long text
LONG = {
    "type": "json_schema",
    "schema": {
        "type": "object",
        "properties": {"text": {"type": "string", "minLength": 5000}},
        "required": ["text"],
        "additionalProperties": False,
    },
}


async def openai_texts(client: Any, job: dict[str, Any]) -> AsyncIterator[str]:
    stream = await client.completions.create(
        model="builtin",
        prompt=job["prompt"],
        max_tokens=job["max_tokens"],
        seed=job["number"],
        stream=True,
        extra_body={"ignore_eos": True},
    )
    finish = None
    async for chunk in stream:
        for choice in chunk.choices:
            finish = choice.finish_reason or finish
            yield choice.text
    check_end(finish)


async def anthropic_texts(client: Any, job: dict[str, Any]) -> AsyncIterator[str]:
    messages = [{"role": "user", "content": job["prompt"]}]
    asked = {"model": "builtin", "max_tokens": job["max_tokens"], "messages": messages}
    more = {"temperature": 0, "output_config": {"format": LONG}}
    async with client.messages.stream(**asked, extra_body=more) as stream:
        async for text in stream.text_stream:
            yield text
        check_end((await stream.get_final_message()).stop_reason)


def check_end(finish: str | None) -> None:
    if finish is None:
        raise RuntimeError("the stream has ended without a finish reason")


def tell(**fields: Any) -> None:
    print(json.dumps({**fields, "at_s": time.monotonic()}), flush=True)


async def stream(texts: AsyncIterator[str], number: int) -> None:
    whole, error = "", None
    try:
        async for text in texts:
            if text and not whole:
                tell(number=number, event="first")
            whole += text
    except Exception as caught:
        error = {"class": type(caught).__name__, "message": str(caught)}
    tell(number=number, event="end", text=whole, error=error)


async def main() -> None:
    name, asked = sys.argv[1], json.load(sys.stdin)
    if name == "openai":
        from openai import AsyncOpenAI

        client: Any = AsyncOpenAI(base_url=f"{asked['url']}/v1", api_key="none")
        texts = openai_texts
    else:
        from anthropic import AsyncAnthropic

        client, texts = AsyncAnthropic(base_url=asked["url"], api_key="none"), anthropic_texts
    await asyncio.gather(*(stream(texts(client, job), job["number"]) for job in asked["jobs"]))


if __name__ == "__main__":
    asyncio.run(main())
