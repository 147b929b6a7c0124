"""What the other protocols add to gemserve: endpoints, and errors in their forms."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from gemserve.wings import AppParts, OpenedWing, Wing

if TYPE_CHECKING:
    from gemserve.api.error_forms import ErrorForm
    from gemserve.api.routes.operation import Routes
    from gemserve.api.serving import Serving


class Dialects(Wing):
    def error_forms(self) -> Sequence[type[ErrorForm]]:
        from gemserve_dialects.anthropic.errors import AnthropicErrors
        from gemserve_dialects.ollama.errors import OllamaErrors

        return AnthropicErrors, OllamaErrors

    def last_words(
        self, path: str, *, message: str, code: str, request_id: str, last_body: bytes
    ) -> bytes | None:
        from gemserve_dialects.last_words import last_words

        return last_words(
            path, message=message, code=code, request_id=request_id, last_body=last_body
        )

    def open(self, serving: Serving) -> OpenedWing:
        return OpenedDialects()


class OpenedDialects(OpenedWing):
    def routes(self, parts: AppParts) -> Sequence[Routes]:
        from gemserve_dialects.anthropic.routes import anthropic_routes
        from gemserve_dialects.ollama.routes import ollama_routes
        from gemserve_dialects.openai_responses.routes import openai_responses_routes

        submitter, builder = parts.submitter, parts.serving.builder
        return [
            openai_responses_routes(submitter, builder),
            anthropic_routes(submitter, builder),
            ollama_routes(submitter, builder, parts.models, parts.serving.model_type),
        ]


DIALECTS = Dialects()
