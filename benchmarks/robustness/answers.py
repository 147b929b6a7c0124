"""Brings the replies of all routes, whole or streamed, into one form that can be compared.

An answer has what must be the same however a request is sent: texts, calls, finish reasons, and
counts of tokens. Identifiers, times and what the cache had are left out.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

Answer = dict[str, Any]
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
RESPONSES, MESSAGES, SELECTION = "/v1/responses", "/v1/messages", "/v1/filter"


def answer_of(path: str, reply: dict[str, Any]) -> Answer:
    """The answer in a whole reply."""
    if reply.get("error"):
        return {"error": reply["error"].get("message")}
    if path in (CHAT, COMPLETIONS):
        choices = sorted(reply["choices"], key=lambda choice: choice["index"])
        return _counted([_choice(choice) for choice in choices], reply["usage"])
    if path == RESPONSES:
        return _response(reply)
    if path == MESSAGES:
        usage = reply["usage"]
        return {
            "parts": [_block(block) for block in reply["content"]],
            "finish": reply["stop_reason"],
            "tokens": [_input_tokens(usage), usage["output_tokens"]],
        }
    if path == SELECTION:
        report = reply["filter"]
        return {"text": reply["text"], "kept": report["kept_tokens"], "at": report["selection"]}
    kept = {"tokens", "count", "input_tokens", "prompt"}
    return {name: value for name, value in reply.items() if name in kept}


def _choice(choice: dict[str, Any]) -> dict[str, Any]:
    message = choice.get("message") or {}
    calls = [
        [call["function"]["name"], call["function"]["arguments"]]
        for call in message.get("tool_calls") or ()
    ]
    text = choice["text"] if "text" in choice else message.get("content") or ""
    return {"text": text, "calls": calls, "finish": choice["finish_reason"]}


def _counted(choices: list[dict[str, Any]], usage: dict[str, Any]) -> Answer:
    return {"choices": choices, "tokens": [usage["prompt_tokens"], usage["completion_tokens"]]}


def _response(reply: dict[str, Any]) -> Answer:
    parts = []
    for item in reply["output"]:
        if item["type"] == "function_call":
            parts.append([item["name"], item["arguments"]])
        else:
            parts.append("".join(part["text"] for part in item["content"]))
    usage = reply["usage"]
    counts = [usage["input_tokens"], usage["output_tokens"]]
    return {"parts": parts, "finish": reply["status"], "tokens": counts}


def _block(block: dict[str, Any]) -> Any:
    return block["text"] if block["type"] == "text" else [block["name"], block["input"]]


class StreamedAnswer:
    """Puts an answer together from the events of a stream, in their order."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._choices: dict[int, dict[str, Any]] = {}
        self._usage: dict[str, Any] = {}
        self._final: dict[str, Any] = {}
        self._blocks: list[dict[str, Any]] = []
        self._texts: list[str] = []
        self._error: str | None = None
        self.is_ended = False

    def see(self, data: str) -> bool:
        """Take in one event. Returns whether it brings something of the answer."""
        if data == "[DONE]":
            self.is_ended = True
            return False
        event = json.loads(data)
        if event.get("error"):
            self._error = event["error"].get("message")
            self.is_ended = True
            return False
        if self._path in (CHAT, COMPLETIONS):
            return self._see_chunk(event)
        if self._path == RESPONSES:
            return self._see_response(event)
        return self._see_message(event)

    def answer(self) -> Answer:
        """The whole answer; call it after the stream's end."""
        if self._error is not None:
            return {"error": self._error}
        if self._path in (CHAT, COMPLETIONS):
            return _counted([self._choices[i] for i in sorted(self._choices)], self._usage)
        if self._path == RESPONSES:
            answer = _response(self._final)
            text = "".join(part for part in answer["parts"] if isinstance(part, str))
            assert text == "".join(self._texts), "the deltas are not the text of the last event"
            return answer
        for block in self._blocks:
            if block["type"] == "tool_use":
                block["input"] = json.loads(block.pop("json") or "{}")
        return {
            "parts": [_block(block) for block in self._blocks],
            "finish": self._final["stop_reason"],
            "tokens": [_input_tokens(self._usage), self._usage["output_tokens"]],
        }

    @property
    def text(self) -> str:
        """The text of the first choice until now."""
        if self._path in (CHAT, COMPLETIONS):
            return str(self._choices[0]["text"]) if 0 in self._choices else ""
        return "".join(self._texts)

    def _see_chunk(self, event: dict[str, Any]) -> bool:
        self._usage = event.get("usage") or self._usage
        found = False
        for choice in event["choices"]:
            empty = {"text": "", "calls": [], "finish": None}
            known = self._choices.setdefault(choice["index"], empty)
            delta = choice.get("delta") or {}
            text = choice.get("text") or delta.get("content") or ""
            known["text"] += text
            for call in delta.get("tool_calls") or ():
                self._add_call(known["calls"], call)
                found = True
            known["finish"] = choice.get("finish_reason") or known["finish"]
            found = found or bool(text)
        return found

    def _add_call(self, calls: list[list[str]], call: dict[str, Any]) -> None:
        while len(calls) <= call["index"]:
            calls.append(["", ""])
        function = call["function"]
        calls[call["index"]][0] += function.get("name") or ""
        calls[call["index"]][1] += function.get("arguments") or ""

    def _see_response(self, event: dict[str, Any]) -> bool:
        if event["type"] in ("response.completed", "response.incomplete", "response.failed"):
            self._final, self.is_ended = event["response"], True
        if event["type"] == "response.output_text.delta":
            self._texts.append(event["delta"])
            return True
        return False

    def _see_message(self, event: dict[str, Any]) -> bool:
        kind = event["type"]
        if kind == "message_start":
            self._usage |= event["message"]["usage"]
        elif kind == "content_block_start":
            self._blocks.append({**event["content_block"], "json": ""})
        elif kind == "content_block_delta":
            self._add_delta(event["delta"])
            return True
        elif kind == "message_delta":
            self._final = event["delta"]
            self._usage |= {k: v for k, v in event["usage"].items() if v is not None}
        elif kind == "message_stop":
            self.is_ended = True
        return False

    def _add_delta(self, delta: dict[str, Any]) -> None:
        block = self._blocks[-1]
        if delta["type"] == "text_delta":
            block["text"] += delta["text"]
            self._texts.append(delta["text"])
        else:
            block["json"] += delta["partial_json"]


def _input_tokens(usage: dict[str, Any]) -> int:
    """A message's tokens with those that were cached, which `input_tokens` leaves out."""
    parts = ("input_tokens", "cache_read_input_tokens", "cache_creation_input_tokens")
    return sum(usage.get(part) or 0 for part in parts)


def difference(expected: Sequence[Answer], answer: Answer) -> str | None:
    """What is wrong about an answer if it is none of those expected."""
    if answer in expected:
        return None
    return f"expected {json.dumps(expected[0])[:400]}, got {json.dumps(answer)[:400]}"
