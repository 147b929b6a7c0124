"""Calls in an answer's text, however it is cut into pieces."""

from __future__ import annotations

import json
import time
from random import Random
from typing import Any

import pytest

from gemserve.api.replies.answer_reader import AnswerRules, Piece, Reader
from gemserve.api.requests.tool_choice import ToolCallRules

AUTO: dict[str, Any] = {"is_forced": False, "is_named": False, "is_parallel": True}
NAMES = frozenset({"find", "add_two"})
CALL = '{"name": "find", "arguments": {"what": "a \\"b\\" {", "n": [1, {}]}}'
ARGUMENTS = {"what": 'a "b" {', "n": [1, {}]}


def rules(**changes: Any) -> AnswerRules:
    calls = ToolCallRules(names=NAMES, **{**AUTO, **changes})
    return AnswerRules(calls=calls, has_markers=not changes.get("is_held"))


def reader(**changes: Any) -> Reader:
    return rules(**changes).reader()


def pieces(text: str, seed: int) -> list[str]:
    rng, cut = Random(seed), []
    while text:
        size = rng.randint(1, max(1, seed))
        cut.append(text[:size])
        text = text[size:]
    return cut


def replay(said: list[Piece]) -> tuple[str, list[tuple[str, str]]]:
    """What a client makes of the pieces: content, and name and arguments of each call."""
    calls: list[list[str]] = []
    for piece in said:
        if piece.call is not None:
            calls.append([piece.call.name, ""])
        if piece.kind == "call":
            calls[-1][1] += piece.text
    content = "".join(piece.text for piece in said if piece.kind == "text")
    return content, [(name, arguments) for name, arguments in calls]


def read(found: Reader, text: str, seed: int) -> tuple[str, list[tuple[str, str]]]:
    said = [piece for part in pieces(text, seed) for piece in found.push(part)]
    content, calls = replay([*said, *found.finish()])
    assert calls == [(call.name, call.arguments) for call in found.calls]
    return content, calls


@pytest.mark.parametrize("seed", [1, 2, 5, 200])
@pytest.mark.parametrize("text", [CALL, CALL.replace(": ", ":").replace(", ", ",")])
def test_a_forced_call_in_any_pieces(text: str, seed: int) -> None:
    forced = reader(is_forced=True)
    content, [(name, arguments)] = read(forced, text, seed)
    assert (content, name) == ("", "find")
    assert json.loads(arguments) == json.loads(text)["arguments"]
    assert rules(is_forced=True).finish_reason("stop", has_calls=True) == "tool_calls"
    assert rules(is_forced=True).finish_reason("length", has_calls=True) == "length"


def test_a_call_named_in_advance_ends_with_stop() -> None:
    named = rules(is_forced=True, is_named=True)
    assert named.finish_reason("stop", has_calls=True) == "stop"


@pytest.mark.parametrize("seed", [1, 4, 200])
def test_a_forced_call_that_is_cut_loses_no_character(seed: int) -> None:
    start = CALL.index('{"what"')
    for end in range(len(CALL)):
        content, calls = read(reader(is_forced=True), CALL[:end], seed)
        assert content == ""
        if calls:
            assert calls == [("find", CALL[start:end])]
        else:
            assert end <= start


@pytest.mark.parametrize("seed", [1, 7, 200])
@pytest.mark.parametrize(
    "text",
    [
        CALL,
        f"\n {CALL} \n",
        CALL.replace("arguments", "parameters"),
        f"<tool_call>\n{CALL}\n</tool_call>",
    ],
)
def test_an_answer_that_is_a_call(text: str, seed: int) -> None:
    auto = reader()
    content, [(name, arguments)] = read(auto, text, seed)
    assert (content, name, json.loads(arguments)) == ("", "find", ARGUMENTS)


def test_several_calls_unless_one_is_asked_for() -> None:
    text = (
        f"<tool_call>{CALL}</tool_call>\n<tool_call>{CALL.replace('find', 'add_two')}</tool_call>"
    )
    assert [name for name, _ in read(reader(), text, 9)[1]] == ["find", "add_two"]
    assert [name for name, _ in read(reader(is_parallel=False), text, 9)[1]] == ["find"]


FIND = '{"name": "find", "arguments": {"what": "a"}}'
DEEPSEEK = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>find<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>"  # noqa: E501


def tagged(text: str) -> str:
    return f"<tool_call>{text}</tool_call>"


@pytest.mark.parametrize("seed", [1, 7, 300])
@pytest.mark.parametrize(
    ("text", "calls"),
    [
        # braces too many
        *((text, 1) for text in (f"{FIND}}}", f"{FIND}}}}}", tagged(f"{FIND}}}"))),
        *((text, 1) for text in (f"[{FIND}}}]", f"[TOOL_CALLS][{FIND}}}]")),
        (f"<|python_tag|>{FIND}}}", 1),
        ('[TOOL_CALLS]find[ARGS]{"what": "a"}}', 1),
        ('<function=find>{"what": "a"}}</function>', 1),
        (DEEPSEEK.format('{"what": "a"}}'), 1),
        (f"```json\n{FIND}}}\n```", 1),
        (f"{FIND}}}; {FIND}", 2),
        # end marks too many
        *((tagged(FIND) + end, 1) for end in ("</tool_call>", "\n</tool_call>\n</tool_call>\n")),
        (f"{FIND}\n</tool_call>", 1),
        ('<function=find>{"what": "a"}</function></function>', 1),
        (f"{tagged(FIND)}</tool_call>\n{tagged(FIND)}", 2),
        # last braces that are missing in front of a mark
        *((text, 1) for text in (tagged(FIND[:-1]), tagged(FIND[:-1] + "\n"), tagged(FIND[:-2]))),
        (tagged(FIND[:-1]) + tagged(FIND), 2),
        (f"<|python_tag|>{FIND[:-1]}<|eom_id|>", 1),
        (f"[TOOL_CALLS][{FIND[:-1]}]", 1),
        ('<function=find>{"what": "a"</function>', 1),
        (DEEPSEEK.format('{"what": "a"'), 1),
        (f"```json\n{FIND[:-1]}\n```", 1),
        # an end mark that is missing behind whole calls
        (f"[TOOL_CALLS][{FIND}", 1),
    ],
)
def test_marks_and_braces_that_models_repeat_or_forget(text: str, calls: int, seed: int) -> None:
    content, found = read(reader(), text, seed)
    assert content == ""
    assert [(name, json.loads(given)) for name, given in found] == [("find", {"what": "a"})] * calls


@pytest.mark.parametrize("seed", [1, 7, 300])
@pytest.mark.parametrize(
    "text",
    [
        '{"name": "find"}',
        '{"type": "function", "function": {"name": "find"}}',
        *(f'{{"name": "find", "{key}": null}}' for key in ("arguments", "parameters")),
        *(f'{{"name": "find", "arguments": "{text}"}}' for text in ("", "null", "{}")),
        '[{"name": "find"}]',
        '```json\n{"name": "find"}\n```',
        tagged('{"name": "find"}'),
        tagged('{"name": "find", "arguments": ""}'),
        "<function=find>null</function>",
        "[TOOL_CALLS]find[ARGS]null",
        DEEPSEEK.format(""),
    ],
)
def test_a_call_without_arguments(text: str, seed: int) -> None:
    assert read(reader(), text, seed) == ("", [("find", "{}")])


def test_a_name_alone_is_no_call_where_it_may_be_an_answer() -> None:
    text = '{"name": "find"}'
    takes = {"find": {"type": "object", "properties": {"what": {"type": "string"}}}}
    assert read(reader(parameters=takes), text, 7) == (text, [])
    assert read(reader(is_held=True), text, 7) == (text, [])
    for marked in (tagged(text), '{"name": "find", "arguments": null}'):
        assert read(reader(parameters=takes), marked, 7) == ("", [("find", "{}")])


@pytest.mark.parametrize("seed", [1, 7, 200])
@pytest.mark.parametrize(
    "text",
    [
        "",
        "  ",
        "It is seven.",
        f"I call {CALL}",
        CALL[:-1],
        CALL.replace("find", "other"),
        CALL[:-1] + ', "more": 1}',
        '{"name": "find", "arguments": "x"}',
        '{"name": ["find"], "arguments": {}}',
        '{"a": 1}',
        *(f"<tool_call>{FIND[:-1]}", tagged(FIND[:-3])),
        "[" * 5000,
        "{" + '"a":{' * 5000,
        "<tool_call>" * 3000,
        "<tool_",
        "<b>bold</b>",
    ],
)
def test_any_other_answer_is_text_and_complete(text: str, seed: int) -> None:
    auto = reader()
    assert read(auto, text, seed) == (text, [])
    assert rules().finish_reason("stop", has_calls=False) == "stop"


def test_plain_text_is_not_held_back() -> None:
    auto = reader()
    assert auto.push(" I") == [Piece("text", " I")]
    assert auto.push(" {") == [Piece("text", " {")]


@pytest.mark.parametrize("value", ["1" * 5000, "[" * 1500 + "]" * 1500, '"}\\"{"'])
def test_a_forced_call_s_last_brace_is_not_an_argument(value: str) -> None:
    """Even where a parser would refuse the arguments."""
    arguments = '{"x": ' + value + "}"
    found = reader(is_forced=True)
    _, calls = read(found, '{"name": "find", "arguments": ' + arguments + "}", 7)
    assert calls == [("find", arguments)]


@pytest.mark.parametrize("value", ["NaN", "1e999", '"\\ud800"'])
def test_what_json_cannot_carry_is_no_call(value: str) -> None:
    text = '{"name": "find", "arguments": {"what": ' + value + "}}"
    content, calls = read(reader(), text, 5)
    assert (content, calls) == (text, [])


def test_a_call_nested_too_deeply_to_be_written_is_text() -> None:
    """Reading it stops at another depth than writing it, where the stream ended in an error."""
    for depth in range(300, 1100, 7):
        text = '{"name": "find", "arguments": ' + '{"a":' * depth + "1" + "}" * (depth + 1)
        found = reader()
        content, calls = read(found, text, 200)
        assert calls or content == text


def test_a_call_that_is_cut_within_a_text_is_read_once() -> None:
    """Each quote in it was tried as the beginning of a text: a second for 8,000."""
    text = '{"name": "find", "arguments": {"what": "' + '\\"' * 50_000
    read = reader(is_forced=True)
    began_s = time.process_time()
    said = [*read.push(text), *read.finish()]
    assert time.process_time() - began_s < 1
    ((_, arguments),) = replay(said)[1]
    assert arguments == text.partition('"arguments": ')[2]
