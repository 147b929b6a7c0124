"""The last words of a stream whose replica was lost, in the form of the stream's protocol."""

from __future__ import annotations

import json
import re

from gemserve.api.anthropic.errors import AnthropicErrors, anthropic_error
from gemserve.api.error_replies import error_body
from gemserve.api.ollama.errors import OllamaErrors
from gemserve.api.replies.server_sent_events import DONE, EVENTS, data_event, named_event

STREAM_TYPES = (EVENTS.encode(), b"application/x-ndjson")
_NUMBER = re.compile(rb'"sequence_number": ?(\d+)')


def last_words(path: str, message: str, code: str, request_id: str, last_body: bytes) -> bytes:
    """One error, and `[DONE]` where the protocol has it. `last_body`: what was sent before."""
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
    return (data_event(error_body(message, kind="overloaded_error", code=code)) + DONE).encode()


def _is_below(path: str, prefix: str) -> bool:
    return path == prefix or path.startswith(f"{prefix}/")
