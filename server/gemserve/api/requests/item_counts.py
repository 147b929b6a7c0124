"""How many messages, parts and prompts a body may have. They are counted before any is checked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from gemserve.api.requests.base_bodies import MAX_CHOICES
from gemserve.errors import RequestError

MAX_MESSAGES = 10_000
MAX_PARTS = 20_000  # of all messages: parts of their contents, and calls
_LISTS = ("content", "tool_calls", "output")


def check_counts(body: dict[str, Any]) -> None:
    """Raise `RequestError` for a body with too many of something. Checking each would take long."""
    for field in ("messages", "input"):
        messages = body.get(field)
        if not isinstance(messages, list):
            continue
        _check(field, len(messages), "messages", MAX_MESSAGES)
        _check(field, sum(map(len, _lists_in(messages))), "parts", MAX_PARTS)
    prompts = body.get("prompt")
    if isinstance(prompts, list) and isinstance(next(iter(prompts), None), str | list):
        _check("prompt", len(prompts), "prompts", MAX_CHOICES)


def _lists_in(items: list[Any]) -> Iterator[list[Any]]:
    """The lists of parts in these messages or parts."""
    for item in items:
        for name in _LISTS if isinstance(item, dict) else ():
            parts = item.get(name)
            if isinstance(parts, list):
                yield parts
                yield from _lists_in(parts)


def _check(field: str, count: int, kind: str, limit: int) -> None:
    if count > limit:
        raise RequestError(f"{field}: has {count} {kind}, the limit is {limit}", param=field)
