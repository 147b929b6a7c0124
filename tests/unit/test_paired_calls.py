"""Calls without ids, and results that do not say what they are of."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from gemserve.api.requests.chat_body import Messages

Json = dict[str, Any]
MESSAGES: TypeAdapter[Any] = TypeAdapter(Messages)
USER: Json = {"role": "user", "content": "Well?"}


def asked(*calls: str | tuple[str, str | None]) -> Json:
    """A message with calls, by their names, or by names and ids."""
    named = [(call, None) if isinstance(call, str) else call for call in calls]
    return {
        "role": "assistant",
        "tool_calls": [
            {"id": given, "function": {"name": name, "arguments": "{}"}} for name, given in named
        ],
    }


def gave(content: str, name: str | None = None, given: str | None = None) -> Json:
    return {"role": "tool", "content": content, "name": name, "tool_call_id": given}


def before_tools(name: str, content: str) -> list[Json]:
    return [
        {"role": "assistant", "function_call": {"name": name, "arguments": "{}"}},
        {"role": "function", "name": name, "content": content},
    ]


# the history, and for each result the number of its call; None: it has none
CASES: list[tuple[str, list[Json], list[int | None]]] = [
    ("in their order", [asked("f", "g"), gave("a"), gave("b")], [0, 1]),
    ("by name", [asked("f", "g"), gave("a", "g"), gave("b", "f")], [1, 0]),
    ("the same name twice", [asked("f", "f"), gave("a", "f"), gave("b", "f")], [0, 1]),
    ("empty ids", [asked(("f", ""), ("g", "")), gave("a", given=""), gave("b", given="")], [0, 1]),
    ("only the result has none", [asked(("f", "x"), ("g", "y")), gave("a", "g")], [1]),
    ("one by id, the next one by order",
     [asked(("f", "x"), ("g", "y")), gave("a", given="x"), gave("b")], [0, 1]),
    ("another name than any", [asked("f"), gave("a", "mcp_f")], [0]),
    ("turns", [asked("f"), gave("a"), USER, asked("f"), gave("b")], [0, 1]),
    ("one that was never answered", [asked("f", "g"), gave("a"), USER, asked("f"), gave("b", "f")],
     [0, 2]),
    ("before tools", before_tools("f", "a") + before_tools("f", "b"), [0, 1]),
    ("a call for each message, then the results",
     [asked("f"), asked("g"), gave("a"), gave("b")], [0, 1]),
    ("no call", [gave("a"), asked("f"), gave("b")], [None, 0]),
    ("more results than calls", [asked("f"), gave("a"), gave("b")], [0, None]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "history", "wanted"), CASES, ids=lambda it: str(it)[:40])
def test_a_result_has_the_id_of_its_call(
    name: str, history: list[Json], wanted: list[int | None]
) -> None:
    plain = [message.plain for message in MESSAGES.validate_python([USER, *history, USER])]
    ids = [call["id"] for message in plain for call in message.get("tool_calls", ())]
    assert all(ids), name
    assert len(set(ids)) == len(ids)
    of = [message.get("tool_call_id") for message in plain if message["role"] == "tool"]
    assert of == [None if number is None else ids[number] for number in wanted]


def test_ids_that_are_given_stay_and_new_ones_are_others() -> None:
    history = [asked(("f", "call00002"), "g"), gave("b", "g")]
    _, called, result = (message.plain for message in MESSAGES.validate_python([USER, *history]))
    first, second = (call["id"] for call in called["tool_calls"])
    assert first == "call00002"
    assert second == result["tool_call_id"] not in (None, first)


def test_the_result_of_a_call_that_is_not_there_keeps_its_name() -> None:
    [message] = MESSAGES.validate_python([{"role": "function", "name": "f", "content": "a"}])
    assert message.plain["tool_call_id"] == "call_f"
