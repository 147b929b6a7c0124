"""How large texts are, what is too large to be tokenized, and who pays for it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fastapi import Request

from gemserve.errors import RequestError
from gemserve.prompting.client_text import texts_within
from gemserve.prompting.encoding import num_bytes

# of what is only tokenized or detokenized; or as many as a prompt may have
MOST_BYTES = 4 << 20
MOST_TOKENS = 1 << 20
BYTES_PER_TOKEN = 4  # of text, of which nobody has counted the tokens
_LEAST_CHARS = 16  # as which each text counts: many short ones take as long as a few long ones


def charge(http: Request, num_tokens: int) -> None:
    """Count tokens to the quota of the request's key, if there are keys."""
    place = http.scope["state"].get("place")
    if place is not None:
        place.charge(num_tokens)


def count_chars(value: Any) -> int:
    """Characters of all texts within a JSON value, names of members too."""
    return _count(value, len)


def count_chat_chars(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> int:
    """Characters of all that a chat template gets from a client, but for the names of roles."""
    return count_chars([_shown(messages), tools, variables or {}])


def count_chat_bytes(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
    variables: Mapping[str, Any] | None = None,
) -> int:
    """Bytes as UTF-8 of all that a chat template gets from a client, but for the names of roles."""
    return _count([_shown(messages), tools, variables or {}], num_bytes)


def check_tokenized_bytes(size: int, limit: int, field: str) -> None:
    """Raise `RequestError` for a text that is too long to be tokenized."""
    if size > limit:
        raise RequestError(
            f"{field}: has {size} bytes as UTF-8, the limit of what is tokenized is {limit}",
            param=field,
            code="body_too_large",
        )


def _shown(messages: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    return [[value for name, value in each.items() if name != "role"] for each in messages]


def _count(value: Any, size: Callable[[str], int]) -> int:
    return sum(max(_LEAST_CHARS, size(text)) for text in texts_within(value) if text)
