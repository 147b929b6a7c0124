"""Tools in prompts: the template's own way where it has one, words where it has none."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from gemserve.prompting.prompt import chat_prompt
from gemserve.prompting.tools import for_template

TOOLS = [{"type": "function", "function": {"name": "find", "description": "Finds."}}]
CALL = {"id": "c", "type": "function", "function": {"name": "find", "arguments": {"x": "é"}}}
MESSAGES: list[dict[str, Any]] = [
    {"role": "user", "content": "Where is it?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "c", "content": "There."},
    {"role": "user", "content": "Where exactly is it?"},
]
NATIVE = (
    "{% if tools %}<|system|>TOOLS {{ tools | tojson }}<|end|>{% endif %}"
    "{% for m in messages %}<|user|>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}CALL {{ c.function.arguments | tojson }}{% endfor %}"
    "<|end|>{% endfor %}<|assistant|>"
)


@pytest.fixture
def native(tokenizer: Any) -> Any:
    """A tokenizer whose template takes tools."""
    changed = copy.copy(tokenizer)
    changed.chat_template = NATIVE
    return changed


def test_a_template_that_takes_tools_gets_them(native: Any) -> None:
    taken, tools = for_template(native, MESSAGES, TOOLS)
    named = [*MESSAGES[:2], {**MESSAGES[2], "name": "find"}, MESSAGES[3]]  # Hermes's shows it
    assert ([one.message for one in taken], tools) == (named, TOOLS)
    assert [one.called for one in taken] == [(), (CALL,), (), ()]
    assert not any(part.is_written for one in taken for part in one.parts)
    prompt = chat_prompt(native, MESSAGES, tools=TOOLS)
    assert 'TOOLS [{"type": "function"' in prompt.text
    assert 'CALL {"x": "é"}' in prompt.text


def test_tools_and_the_question_are_protected(native: Any, tokenizer: Any) -> None:
    for used in (native, tokenizer):
        prompt = chat_prompt(used, MESSAGES, tools=TOOLS)
        kept = {p for span in prompt.protected for p in range(span.start, span.stop)}
        said = used.decode([i for p, i in enumerate(prompt.ids) if p in kept])
        assert "Finds." in said
        assert "Where exactly is it?" in said


def test_without_one_they_are_words(tokenizer: Any) -> None:
    taken, tools = for_template(tokenizer, MESSAGES, TOOLS)
    messages = [one.message for one in taken]
    assert tools == ()
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "tool", "user"]
    assert '"description": "Finds."' in messages[0]["content"]
    assert json.loads(messages[2]["content"]) == CALL["function"]
    assert not any("tool_calls" in message for message in messages)
    # the parts still say whose text it is: of which message of the client's, or the server's own
    written = [[(part.index, part.is_written) for part in one.parts] for one in taken]
    assert written == [
        [(0, True)],
        [(0, False)],
        [(1, False), (1, True)],
        [(2, False)],
        [(3, False)],
    ]
    assert [one.called for one in taken] == [(), (), (CALL,), (), ()]


def test_a_system_message_that_describes_tools_has_both_parts(tokenizer: Any) -> None:
    """The client's own part may be a document; the description never is."""
    given = [{"role": "system", "content": "Be brief."}, *MESSAGES]
    taken, _ = for_template(tokenizer, given, TOOLS)
    first = taken[0]
    assert [(part.role, part.is_written) for part in first.parts] == [
        ("system", False),
        ("system", True),
    ]
    assert "\n\n".join(part.text for part in first.parts) == first.message["content"]
    assert given[0] == {"role": "system", "content": "Be brief."}, "the client's is left as it was"


def test_without_tools_nothing_is_added(tokenizer: Any) -> None:
    plain = [{"role": "user", "content": "Hi"}]
    assert [one.message for one in for_template(tokenizer, plain, ())[0]] == plain
