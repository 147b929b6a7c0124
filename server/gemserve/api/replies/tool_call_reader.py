"""Tool calls in an answer's text, found as it comes.

A call is JSON: `{"name": …, "arguments": {…}}`. Where the answer is forced to be one, the grammar
writes exactly that, and it is passed on piece by piece. Otherwise an answer counts as calls if all
of it is: one such object, or some, each in `<tool_call>` tags, as many models are trained to write
them. Until that is known, text that begins like a call is held back.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass, field
from typing import Any

Json = dict[str, Any]
_TAG = "<tool_call>"
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_FORCED = re.compile(r'\{"name": ?"([^"]*)", ?"arguments": ?(?=\{)')
_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>\s*", re.DOTALL)


@dataclass(frozen=True, slots=True, kw_only=True)
class CallRules:
    """Which calls an answer may have. `is_named`: it must be one of the only function there is."""

    names: frozenset[str]
    is_forced: bool
    is_named: bool
    is_parallel: bool


@dataclass(slots=True)
class Call:
    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    @property
    def content(self) -> Json:
        """As a message has it."""
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


class CallReader:
    """One answer's text in, deltas of a message out; `calls` and `content` hold all so far."""

    def __init__(self, rules: CallRules) -> None:
        self._rules = rules
        self._held = ""
        self._is_text = False  # nothing that comes can make it a call
        self.content = ""
        self.calls: list[Call] = []

    def push(self, text: str) -> Json:
        """What is final now, as a delta of the message; possibly nothing."""
        self._held += text
        if self._rules.is_forced:
            return self._push_forced()
        start = self._held.lstrip()
        if not self._is_text and (start.startswith(("{", _TAG)) or _TAG.startswith(start)):
            return {}
        self._is_text = True
        return self._say()

    def finish(self) -> Json:
        """The rest."""
        if self._rules.is_forced:
            return self._finish_forced()
        if not self._is_text:
            self.calls = self._parsed()
        if not self.calls:
            return self._say()
        deltas = [{"index": at, **call.content} for at, call in enumerate(self.calls)]
        return {"tool_calls": deltas}

    def finish_reason(self, reason: str) -> str:
        """As OpenAI has it: what ends in a call that was not named in advance has its own."""
        is_call = bool(self.calls) and reason == "stop" and not self._rules.is_named
        return "tool_calls" if is_call else reason

    def _say(self) -> Json:
        text, self._held = self._held, ""
        self.content += text
        return {"content": text} if text else {}

    def _push_forced(self) -> Json:
        opening: Json = {}
        if not self.calls:
            match = _FORCED.match(self._held)
            if match is None:
                return {}
            self.calls.append(Call(match[1], ""))
            opening = self.calls[0].content
            self._held = self._held[match.end() :]
        # the last character may be the brace that closes the call, not its arguments
        return self._argue(opening, self._held[:-1], self._held[-1:])

    def _finish_forced(self) -> Json:
        if not self.calls:
            return {}  # cut off before its name was known
        is_whole = _is_closed(self.calls[0].arguments)
        return self._argue({}, "" if is_whole else self._held, "")

    def _argue(self, opening: Json, text: str, held: str) -> Json:
        self._held = held
        self.calls[0].arguments += text
        if not opening and not text:
            return {}
        function = {**opening.get("function", {}), "arguments": text}
        return {"tool_calls": [{"index": 0, **opening, "function": function}]}

    def _parsed(self) -> list[Call]:
        """The calls that all of the text consists of, or none."""
        text = self._held.strip()
        tagged: list[str] = []
        if text.startswith(_TAG):
            if text.count(_TAG) != text.count("</tool_call>") or _TAGGED.sub("", text):
                return []
            tagged = _TAGGED.findall(text)
        calls = [self._call(part) for part in tagged or [text]]
        found = [call for call in calls if call is not None]
        if len(found) < len(calls):
            return []
        return found if self._rules.is_parallel else found[:1]

    def _call(self, text: str) -> Call | None:
        call = _parse(text)
        if call is None or len(call) != 2:
            return None
        name = call.get("name")
        arguments = call.get("arguments", call.get("parameters"))  # some models say so
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        if name not in self._rules.names:
            return None
        try:
            written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            written.encode()  # an escape may name half a character
        except ValueError:
            return None
        return Call(name, written)


def _is_closed(text: str) -> bool:
    """Is every brace closed? A JSON parser would refuse what is deep or has long numbers."""
    bare = _STRING.sub("", text)
    return '"' not in bare and bare.count("{") == bare.count("}") > 0


def _parse(text: str) -> Json | None:
    """A JSON object, if the text is one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
