"""What the measurements of agents' requests rest on: their texts, and who each token belongs to."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.agents import agent_text, request_shapes, stuffed_system, tool_loops
from benchmarks.agents.prompt_parts import (
    KEPT_WHOLE,
    Chat,
    Part,
    count_kept,
    find_parts,
    find_text,
    render,
)
from benchmarks.agents.request_shapes import SHAPES, Conversation, make_chat, read_request
from gemserve.api.requests.chat_body import ChatBody
from gemserve.calibration.search.example import ExampleDraw
from tests.agent_requests import RECORDED
from tests.chat_templates import ALTERNATING, FAMILIES, shaped_like

WITH_TOOLS = [family for family in FAMILIES if family not in ALTERNATING]


def small_chat() -> Chat:
    """An agent's request with a bit of everything."""
    chat = Conversation("small", seed=1)
    chat.system(120)
    chat.offer(3)
    chat.ask(has_reminder=True)
    chat.work((agent_text.log, 60), (agent_text.records, 60), has_remark=False)
    chat.system(40, role="developer")
    chat.work((agent_text.source_file, 90))
    chat.answer(30)
    chat.ask(before=agent_text.document_file(chat.rng, 300), has_reminder=True)
    return chat.chat


def text_of(prompt: Any, part: Part) -> str:
    return str(prompt.text[prompt.offsets[part.start][0] : prompt.offsets[part.stop - 1][1]])


@pytest.mark.parametrize("family", ["builtin", *WITH_TOOLS])
def test_every_token_belongs_to_the_part_that_has_its_text(tokenizer: Any, family: str) -> None:
    """The measurement is only as good as its own account of the prompt, whatever the template."""
    chat = small_chat()
    shaped = tokenizer if family == "builtin" else shaped_like(tokenizer, family)
    prompt = render(shaped, chat)
    parts = find_parts(shaped, chat, prompt)
    assert (parts[0].start, parts[-1].stop) == (0, len(prompt.ids))
    assert all(one.stop == other.start for one, other in pairwise(parts))
    for index, message in enumerate(chat.messages):
        own = [part for part in parts if part.message == index]
        # some templates leave messages out, and one writes results as JSON
        if message["content"] and message["content"].strip() in prompt.text:
            shown = "".join(text_of(prompt, part) for part in own)
            assert " ".join(message["content"].split()) in " ".join(shown.split())
    texts = dict.fromkeys(KEPT_WHOLE, "")
    for part in parts:
        if part.role in texts:
            texts[part.role] += text_of(prompt, part)
    frame = texts["tools"] + texts["calls"] + texts["template"]
    calls = [call for message in chat.messages for call in message.get("tool_calls", ())]
    for part in (*chat.tools, *calls):
        name = part["function"]["name"]
        assert frame.count(name) == prompt.text.count(name)
    if family in ("builtin", "chatml", "qwen2", "qwen3"):
        assert all(tool["function"]["name"] in texts["tools"] for tool in chat.tools)
        assert len(calls) == texts["calls"].count('"arguments"') == 3
    assert chat.requests[0] in texts["request"]
    assert "system-reminder" not in texts["request"]


def test_a_message_that_ends_with_blanks_loses_nothing_with_them(tokenizer: Any) -> None:
    chat = Chat(name="blanks", messages=[{"role": "system", "content": "\n\nBe brief.\n\n\n"}])
    chat.messages.append({"role": "user", "content": "Why?"})
    prompt = render(tokenizer, chat)
    parts = find_parts(tokenizer, chat, prompt)
    (system,) = [part for part in parts if part.role == "system"]
    assert text_of(prompt, system) == "Be brief."
    assert [part.role for part in parts].count("blank") >= 1


def test_kept_tokens_are_counted_by_part() -> None:
    parts = [
        Part(role="system", message=0, start=0, stop=10),
        Part(role="result", message=1, start=10, stop=20),
        Part(role="request", message=2, start=20, stop=25),
    ]
    assert count_kept(parts, [(0, 4), (8, 12), (19, 25)]) == [6, 3, 5]
    assert count_kept(parts, []) == [0, 0, 0]
    assert count_kept(parts, [(0, 25)]) == [10, 10, 5]


def report_of(*kept: int, protected: int = 10, reason: str | None = None) -> dict[str, Any]:
    """A filter's report on a system message of ten tokens and a result of thirty."""
    entries = [
        {"index": i, "tokens": tokens, "kept_tokens": count, "protected_tokens": share}
        for i, (tokens, count, share) in enumerate(zip((10, 30), kept, (protected, 0), strict=True))
    ]
    total = {"prompt_tokens": 40, "kept_tokens": sum(kept), "protected_tokens": protected}
    return {**total, "applied": True, "reason": reason, "messages": entries}


@pytest.mark.parametrize(
    ("report", "counts", "said"),
    [
        (report_of(10, 16), [10, 16], None),
        (report_of(10, 20), [10, 20], "20 tokens beside the protected ones"),
        (report_of(10, 20, reason="widened"), [10, 20], None),
        (report_of(8, 16), [8, 16], "more protected tokens than kept"),
        (report_of(10, 6), [10, 16], "message 1: it says 6 of 30 tokens; found 16 of 30"),
        ({"prompt_tokens": 40}, [10, 16], None),
    ],
)
def test_a_report_that_contradicts_its_selection_is_noticed(
    report: dict[str, Any], counts: list[int], said: str | None
) -> None:
    parts = [
        Part(role="system", message=0, start=0, stop=10),
        Part(role="result", message=1, start=10, stop=40),
    ]
    found = request_shapes.find_difference(parts, counts, report, keep=16)
    assert found is None if said is None else said in str(found)


@pytest.mark.parametrize("name", SHAPES)
def test_a_shape_is_a_valid_request_that_its_seed_determines(name: str) -> None:
    chat = make_chat(name, 0)
    assert chat == make_chat(name, 0)
    assert chat.messages != make_chat(name, 1).messages
    ChatBody.model_validate({"model": "any", "messages": chat.messages, "tools": chat.tools})
    assert chat.messages[-1]["role"] in ("user", "tool")
    (wanted,) = chat.requests
    last = [message for message in chat.messages if message["role"] == "user"][-1]
    assert wanted in last["content"]


def test_the_shapes_have_the_sizes_that_agents_have() -> None:
    chats = [make_chat(name, 0) for name in SHAPES]
    assert len(chats) >= 10
    assert {60, 5} <= {len(chat.tools) for chat in chats}
    assert max(len(chat.messages) for chat in chats) >= 50
    systems = [len(c.messages[0]["content"]) for c in chats if c.messages[0]["role"] == "system"]
    assert min(systems) >= agent_text.chars_of(2000)
    assert max(systems) >= agent_text.chars_of(12_000)
    lengths = [len(m["content"]) for c in chats for m in c.messages if m["role"] == "tool"]
    assert min(lengths) < agent_text.chars_of(200)
    assert max(lengths) >= agent_text.chars_of(30_000)


@pytest.mark.parametrize("path", RECORDED)
def test_a_recorded_request_means_the_same_in_every_protocol(
    tokenizer: Any, path: str, tmp_path: Path
) -> None:
    file = tmp_path / "one.json"
    file.write_text(json.dumps({"path": path, "body": RECORDED[path], "note": ""}))
    chat = read_request(file)
    assert [m["role"] for m in chat.messages] == ["system", "user", "assistant", "tool"]
    assert [m["content"] or "" for m in chat.messages] == [
        "Be brief.",
        "What is there?",
        "",
        "A lamp.",
    ]
    assert [tool["function"]["name"] for tool in chat.tools] == ["look_up"]
    parts = find_parts(tokenizer, chat, render(tokenizer, chat))
    assert {"system", "tools", "request", "calls", "result"} <= {part.role for part in parts}


@pytest.mark.parametrize("template", stuffed_system.TEMPLATES)
def test_a_stuffed_system_message_has_its_words_and_its_needed_passage(
    tokenizer: Any, template: str
) -> None:
    draw = ExampleDraw(seed=0, num_tokens=2600, index=1, samples=4)
    stuffed = stuffed_system.make_stuffed(tokenizer, template, draw)
    for chat in (stuffed.in_system, stuffed.in_user):
        prompt = render(tokenizer, chat)
        start, stop = find_text(prompt, stuffed.gold)
        assert 0 < start < stop < len(prompt.ids)
    prompt = render(tokenizer, stuffed.in_system)
    form = stuffed_system.TEMPLATES[template]
    words = "".join(
        prompt.text[prompt.offsets[start][0] : prompt.offsets[stop - 1][1]]
        for start, stop in stuffed_system.instruction_ranges(prompt, stuffed)
    )
    assert form.before.strip() in words
    assert form.behind.strip() in words
    assert stuffed.gold not in words


def test_a_document_is_not_cut_within_the_needed_passage() -> None:
    gold = "Here. Is. What. Is. Needed."
    filler = "Nothing is said here. " * 68
    chunks = stuffed_system.split_document(f"{filler}{gold} {filler}", gold)
    assert len(chunks) > 1
    assert any(gold in chunk for chunk in chunks)
    assert " ".join(chunks) == f"{filler}{gold} {filler}".strip()


def test_a_tool_loop_asks_for_what_its_file_holds(tokenizer: Any) -> None:
    loop = tool_loops.make_loop(tokenizer, "natural", index=0, loops=40, seed=7)
    for ends_with in tool_loops.ENDS:
        chat = tool_loops.closing(loop, ends_with)
        prompt = render(tokenizer, chat)
        assert all(text in prompt.text for text in loop["gold"])
        assert loop["path"] in chat.messages[1]["content"]
        assert prompt.text.count(loop["example"].question) == (2 if ends_with == "question" else 1)


def test_models_may_have_a_longest_prompt() -> None:
    assert request_shapes.parse_models("a,b@30")[1] == ("b", 30)
    assert request_shapes.parse_models("a")[0][1] > 10**6


def test_lengths_are_reached(tokenizer: Any) -> None:
    rng = Random(0)
    for write in (
        agent_text.instructions,
        agent_text.log,
        agent_text.records,
        agent_text.source_file,
        agent_text.document_file,
        agent_text.web_page,
        agent_text.prose,
    ):
        assert 3000 <= len(write(rng, 3000)) <= 5500
