"""Find tool calls in an answer's text while it comes.

A call is JSON: `{"name": …, "arguments": {…}}`. If the answer is forced to be a call, the grammar
makes it exactly that, and the arguments are passed on piece by piece. Otherwise an answer counts as
calls only if it consists of nothing else: one such object, or several, each in `<tool_call>` tags,
as many models are trained to write them. Text that begins like a call is held back until its end.
If a grammar makes the answer a call or JSON of a format, only the beginning of a call is held back.
"""

from __future__ import annotations

import json
import re
import uuid
from dataclasses import dataclass, field

from gemserve.api.replies.reply_types import (
    CallPart,
    ChatFinishReason,
    Delta,
    FinishReason,
    ToolCall,
)
from gemserve.api.requests.tool_choice import ToolCallRules

_TAG = "<tool_call>"
_STRING = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
_FORCED = re.compile(r'\{"name": ?"([^"]*)", ?"arguments": ?(?=\{)')
_TAGGED = re.compile(r"<tool_call>(.*?)</tool_call>\s*", re.DOTALL)


@dataclass(slots=True)
class Call:
    name: str
    arguments: str
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    @property
    def content(self) -> ToolCall:
        """The call as a message has it."""
        return {
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }

    def part(self, index: int) -> CallPart:
        """The call as a stream's delta has it, with all that is known of it."""
        return {
            "index": index,
            "id": self.id,
            "type": "function",
            "function": {"name": self.name, "arguments": self.arguments},
        }


class ToolCallReader:
    """Turns the text of one answer into deltas of a message.

    `calls` and `content` hold what the message has so far.
    """

    def __init__(self, rules: ToolCallRules) -> None:
        self._rules = rules
        self._held = ""
        self._is_text = False  # the answer can no longer be calls
        self.content = ""
        self.calls: list[Call] = []

    def push(self, text: str) -> Delta:
        """Take more text; return what is now final, which may be nothing."""
        self._held += text
        if self._rules.is_forced:
            return self._push_forced()
        if not self._is_text and self._may_be_calls():
            return {}
        self._is_text = True
        return self._release_text()

    def finish(self) -> Delta:
        """The rest of the message."""
        if self._rules.is_forced:
            return self._finish_forced()
        if not self._is_text:
            self.calls = self._parse_calls()
        if not self.calls:
            return self._release_text()
        return {"tool_calls": [call.part(index) for index, call in enumerate(self.calls)]}

    def finish_reason(self, reason: FinishReason) -> ChatFinishReason:
        """ "tool_calls" for calls, unless `tool_choice` names the function: this is as OpenAI's."""
        is_call = bool(self.calls) and reason == "stop" and not self._rules.is_named
        return "tool_calls" if is_call else reason

    def _may_be_calls(self) -> bool:
        start = self._held.lstrip()
        if start.startswith(_TAG) or _TAG.startswith(start):
            return True
        if not self._rules.is_held:
            return start.startswith("{")
        # the grammar allows a space after a colon or a comma, and names have none
        bare = start.replace(" ", "")
        heads = (f'{{"name":"{name}","arguments":{{' for name in self._rules.names)
        return any(bare.startswith(head) or head.startswith(bare) for head in heads)

    def _release_text(self) -> Delta:
        text, self._held = self._held, ""
        self.content += text
        return {"content": text} if text else {}

    def _push_forced(self) -> Delta:
        is_first = not self.calls
        if is_first:
            match = _FORCED.match(self._held)
            if match is None:
                return {}
            self.calls.append(Call(match[1], ""))
            self._held = self._held[match.end() :]
        # the last character may be the brace that closes the call, not its arguments
        return self._add_arguments(self._held[:-1], self._held[-1:], is_first=is_first)

    def _finish_forced(self) -> Delta:
        if not self.calls:
            return {}  # cut off before its name was known
        is_whole = _is_closed(self.calls[0].arguments)
        return self._add_arguments("" if is_whole else self._held, "")

    def _add_arguments(self, text: str, held: str, *, is_first: bool = False) -> Delta:
        """Add to the arguments of the forced call, and hold the rest of the text back."""
        self._held = held
        call = self.calls[0]
        call.arguments += text
        if is_first:
            return {"tool_calls": [call.part(0)]}
        return {"tool_calls": [{"index": 0, "function": {"arguments": text}}]} if text else {}

    def _parse_calls(self) -> list[Call]:
        """The calls that the text consists of; none if there is anything else in it."""
        text = self._held.strip()
        tagged: list[str] = []
        if text.startswith(_TAG):
            if text.count(_TAG) != text.count("</tool_call>") or _TAGGED.sub("", text):
                return []
            tagged = _TAGGED.findall(text)
        calls = [self._parse_call(part) for part in tagged or [text]]
        found = [call for call in calls if call is not None]
        if len(found) < len(calls):
            return []
        return found if self._rules.is_parallel else found[:1]

    def _parse_call(self, text: str) -> Call | None:
        call = _parse_object(text)
        if call is None or len(call) != 2:
            return None
        name = call.get("name")
        arguments = call.get("arguments", call.get("parameters"))  # some models write this
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        if name not in self._rules.names:
            return None
        try:
            written = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            written.encode()  # an escape may name half a character
        except (ValueError, RecursionError):
            return None
        return Call(name, written)


def _is_closed(text: str) -> bool:
    """Is every brace closed? A JSON parser would refuse deep nesting and long numbers."""
    bare = _STRING.sub("", text)
    return '"' not in bare and bare.count("{") == bare.count("}") > 0


def _parse_object(text: str) -> dict[str, object] | None:
    """A JSON object, if the text is one."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
