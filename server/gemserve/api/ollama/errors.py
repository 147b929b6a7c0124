"""Errors under /api in Ollama's form: `{"error": message}`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import TypedDict  # typing's tells pydantic too little before Python 3.12

from gemserve.api.error_forms import ErrorForm


class OllamaError(TypedDict):
    error: str


class OllamaErrors(ErrorForm):
    path = "/api"

    def content(
        self, error: Mapping[str, Any], status: int, headers: Mapping[str, str]
    ) -> OllamaError:
        return {"error": error["message"]}
