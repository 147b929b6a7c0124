"""Errors under /api in Ollama's form: `{"error": message}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import TypedDict  # typing's tells pydantic too little before Python 3.12

from gemserve.api.error_forms import ErrorForm, ExceededContext


class OllamaError(TypedDict):
    error: str


class OllamaErrors(ErrorForm):
    path = "/api"

    def content(
        self, error: Mapping[str, Any], status: int, headers: Mapping[str, str]
    ) -> OllamaError:
        exceeded = ExceededContext.find(error)
        return {"error": error["message"] if exceeded is None else _too_long(exceeded, error)}


def _too_long(exceeded: ExceededContext, error: Mapping[str, Any]) -> str:
    """The words by which Ollama's clients know that they must shorten a conversation."""
    wanted = exceeded.prompt + (exceeded.context - exceeded.longest)
    if exceeded.answer is not None:
        wanted = exceeded.prompt + exceeded.answer
    return (
        f"prompt too long; exceeded max context length by {wanted - exceeded.context} tokens. "
        f"{error['message']}"
    )
