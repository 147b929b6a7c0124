"""Errors under /v1/messages in Anthropic's form: `{"type": "error", "error", "request_id"}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from typing_extensions import TypedDict  # typing's tells pydantic too little before Python 3.12

from gemserve.api.error_forms import ErrorForm, ExceededContext, Headers

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
        exceeded = ExceededContext.find(error)
        return anthropic_error(
            error["message"] if exceeded is None else _too_long(exceeded),
            status=status,
            request_id=headers.get("request-id", ""),
            is_overloaded=error.get("type") == "overloaded_error",
        )


def _too_long(exceeded: ExceededContext) -> str:
    """The words by which Anthropic's clients know that they must shorten a conversation.

    Claude Code takes both counts from there, and summarizes a conversation that is shorter by as
    much.
    """
    prompt, answer = exceeded.prompt, exceeded.answer
    if answer is None:
        words = f"prompt is too long: {prompt} tokens > {exceeded.longest} maximum{exceeded.note}"
    else:
        words = (
            f"input length and `max_tokens` exceed context limit: {prompt} + {answer} > "
            f"{exceeded.context}, decrease input length or `max_tokens` and try again"
        )
    return f"{words}. {exceeded.detail}" if exceeded.detail else words
