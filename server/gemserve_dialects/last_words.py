"""The last event of a stream that its own process cannot end, in the form of its protocol."""

from __future__ import annotations

import json
import re

from gemserve.api.replies.server_sent_events import named_event
from gemserve_dialects.anthropic.errors import AnthropicErrors, anthropic_error
from gemserve_dialects.ollama.errors import OllamaErrors

_NUMBER = re.compile(rb'"sequence_number": ?(\d+)')


def last_words(
    path: str, *, message: str, code: str, request_id: str, last_body: bytes
) -> bytes | None:
    """See `gemserve.wings.Wing.last_words`."""
    if _is_below(path, AnthropicErrors.path):
        content = anthropic_error(message, status=503, request_id=request_id, is_overloaded=True)
        return named_event(content).encode()
    if _is_below(path, OllamaErrors.path):
        return json.dumps({"error": message}, ensure_ascii=False).encode() + b"\n"
    if path == "/v1/responses":
        numbers = _NUMBER.findall(last_body)
        return named_event(
            {
                "type": "error",
                "code": code,
                "message": message,
                "param": None,
                "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
            }
        ).encode()
    return None


def _is_below(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")
