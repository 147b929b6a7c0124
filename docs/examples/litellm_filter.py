"""A hook of LiteLLM's proxy that forwards only what the question needs of a long text."""

from __future__ import annotations

import os
from typing import Any

import httpx
from litellm.integrations.custom_logger import CustomLogger

URL = os.environ.get("GEMSERVE_URL", "http://127.0.0.1:8000").removesuffix("/v1")
KEY = os.environ.get("GEMSERVE_API_KEY", "none")
MODEL = os.environ.get("GEMSERVE_MODEL", "builtin")
KEEP = int(os.environ.get("GEMSERVE_KEEP", "1024"))  # tokens of a long text that are forwarded
LONG = int(os.environ.get("GEMSERVE_LONG", "8000"))  # characters from which a text is filtered


class GemserveFilter(CustomLogger):
    """Replaces each long text of a chat by what the last user message needs of it."""

    async def async_pre_call_hook(
        self, user_api_key_dict: Any, cache: Any, data: dict[str, Any], call_type: str
    ) -> dict[str, Any]:
        parts = [part for message in data.get("messages", []) for part in texts_of(message)]
        question = next((text for role, _, _, text in reversed(parts) if role == "user"), "")
        reports = []
        for _, holder, name, text in parts:
            if len(text) >= LONG:
                # a question that is long itself brings its document along
                suffix = "" if text is question else f"\n\n{question}"
                kept, report = await ask(text + suffix)
                holder[name] = kept.removesuffix(suffix)
                reports.append(report)
        data.setdefault("metadata", {})["gemserve"] = reports
        return data


def texts_of(message: dict[str, Any]) -> list[tuple[str, dict[str, Any], str, str]]:
    """Role, dictionary, key and value of each text that a message holds."""
    content = message.get("content")
    if isinstance(content, str):
        return [(message["role"], message, "content", content)]
    texts = [part for part in content or [] if part.get("type") == "text"]
    return [(message["role"], part, "text", part["text"]) for part in texts]


async def ask(prompt: str) -> tuple[str, dict[str, Any]]:
    """The text that gemserve keeps of a prompt, and the filter's report."""
    body = {"model": MODEL, "prompt": prompt, "filter": {"keep": KEEP}}
    async with httpx.AsyncClient(timeout=600) as client:
        headers = {"Authorization": f"Bearer {KEY}"}
        reply = await client.post(f"{URL}/v1/filter", json=body, headers=headers)
        reply.raise_for_status()
        answer = reply.json()
    return answer["text"], answer["filter"]


handler = GemserveFilter()
