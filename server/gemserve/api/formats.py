"""What the two completion endpoints put on the wire, whole or in chunks."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any, Protocol

from gemserve.types import FilterReport

Json = dict[str, Any]


class Format(Protocol):
    prefix: str

    def whole(self, text: str, finish_reason: str) -> Json:
        """`object` and `choices` of a complete response."""
        ...

    def opening(self) -> Json:
        """`object` and `choices` of the first chunk, which carries the filter report."""
        ...

    def delta(self, text: str) -> Json: ...

    def closing(self, finish_reason: str) -> Json: ...


class CompletionFormat:
    prefix = "cmpl"

    def whole(self, text: str, finish_reason: str) -> Json:
        return self._chunk(text, finish_reason)

    def opening(self) -> Json:
        return self._chunk("", None)

    def delta(self, text: str) -> Json:
        return self._chunk(text, None)

    def closing(self, finish_reason: str) -> Json:
        return self._chunk("", finish_reason)

    def _chunk(self, text: str, finish_reason: str | None) -> Json:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": finish_reason}
        return {"object": "text_completion", "choices": [choice]}


class ChatFormat:
    prefix = "chatcmpl"

    def whole(self, text: str, finish_reason: str) -> Json:
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish_reason}
        return {"object": "chat.completion", "choices": [choice]}

    def opening(self) -> Json:
        return self._chunk({"role": "assistant", "content": ""}, None)

    def delta(self, text: str) -> Json:
        return self._chunk({"content": text}, None)

    def closing(self, finish_reason: str) -> Json:
        return self._chunk({}, finish_reason)

    def _chunk(self, delta: Json, finish_reason: str | None) -> Json:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish_reason}
        return {"object": "chat.completion.chunk", "choices": [choice]}


def filter_json(report: FilterReport) -> Json:
    """The response's `filter` object."""
    return {**asdict(report), "filter_ms": round(report.filter_ms, 3)}


def usage_json(report: FilterReport, completion_tokens: int) -> Json:
    """Token counts; the prompt's are what the client sent, not what the filter kept."""
    return {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": report.prompt_tokens + completion_tokens,
    }
