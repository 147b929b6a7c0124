"""Errors under /v1/messages in Anthropic's form: `{"type": "error", "error", "request_id"}`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from typing_extensions import TypedDict  # typing's tells pydantic too little before Python 3.12

from gemserve.api.error_forms import ErrorForm, Headers

AnthropicErrorKind = Literal[
    "invalid_request_error",
    "authentication_error",
    "permission_error",
    "not_found_error",
    "request_too_large",
    "rate_limit_error",
    "api_error",
    "overloaded_error",
]
_KINDS: dict[int, AnthropicErrorKind] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class AnthropicErrorDetail(TypedDict):
    type: AnthropicErrorKind
    message: str


class AnthropicError(TypedDict):
    type: Literal["error"]
    error: AnthropicErrorDetail
    request_id: str


def anthropic_error(
    message: str, *, status: int, request_id: str, is_overloaded: bool = False
) -> AnthropicError:
    kind: AnthropicErrorKind = "api_error" if status >= 500 else "invalid_request_error"
    kind = "overloaded_error" if is_overloaded else _KINDS.get(status, kind)
    return {
        "type": "error",
        "error": {"type": kind, "message": message},
        "request_id": request_id,
    }


class AnthropicErrors(ErrorForm):
    """It also sends the request's id under Anthropic's name.

    The middleware that gives ids is inside.
    """

    path = "/v1/messages"

    def headers(self, given: Headers) -> Headers:
        ids = [value for name, value in given if name.lower() == b"x-request-id"]
        return [*given, *((b"request-id", value) for value in ids)]

    def content(
        self, error: Mapping[str, Any], status: int, headers: Mapping[str, str]
    ) -> AnthropicError:
        is_too_long = error.get("code") == "context_length_exceeded"
        return anthropic_error(
            _too_long(error["message"]) if is_too_long else error["message"],
            status=status,
            request_id=headers.get("request-id", ""),
            is_overloaded=error.get("type") == "overloaded_error",
        )


def _too_long(message: str) -> str:
    """What `PromptTooLong` says, in the words by which clients know it.

    Claude Code takes both counts from there, and summarizes a conversation that is shorter by as
    much.
    """
    counted = re.search(r"is (\d+) tokens(.*)\. However, .* (\d+) input tokens\.(.*)", message)
    if counted is None:
        return f"prompt is too long: {message}"
    context, note, tokens, leaves_one = counted.groups()
    limit = int(context) - bool(leaves_one)
    return f"prompt is too long: {tokens} tokens > {limit} maximum{note}"
