"""Calls beside text and thinking: what a history is written as is read back from an answer.

Every form, in every protocol, whole and streamed token by token and character by character.
"""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from gemserve.api.replies.answer_reader import AnswerRules
from gemserve.api.requests.tool_choice import ToolCallRules
from gemserve.decoding.detokenize import TextStream
from gemserve.decoding.markers import shown_markers
from gemserve.prompting.chat_template import render_chat
from gemserve.prompting.tools import for_template
from tests.chat_templates import shaped_like
from tests.described import events_of
from tests.fakes import CHAT, COMPLETIONS, FILTERED, Api, data_of

pytestmark = pytest.mark.anyio
Json = dict[str, Any]
USER = {"role": "user", "content": "Where is it?"}
PARAMETERS: Json = {
    "type": "object",
    "properties": {"what": {"type": "string"}, "n": {"type": "integer"}, "deep": {}},
}
ARGUMENTS: Json = {"what": 'a "b"\n {1} é', "n": 7, "deep": {"x": [1, None, True]}}
FIND: tuple[str, Json] = ("find", ARGUMENTS)
STOP: tuple[str, Json] = ("stop", {})
NAMES = ("find", "stop")
PROTOCOLS = ("chat", "messages", "responses", "ollama")


@dataclass
class Said:
    """What a client has of an answer."""

    text: str = ""
    thinking: str = ""
    calls: list[tuple[str, Json]] = field(default_factory=list)
    reason: str = "stop"


def said(text: str = "", *calls: tuple[str, Json], thinking: str = "") -> Said:
    return Said(text, thinking, list(calls), "calls" if calls else "stop")


async def ask(api: Api, protocol: str, pieces: list[str], *, streamed: bool, **fields: Any) -> Said:
    api.core.script = (FILTERED, *pieces)
    return await READERS[protocol](api, streamed, fields.get("names", NAMES))


def chat_tools(names: tuple[str, ...]) -> list[Json]:
    return [
        {"type": "function", "function": {"name": name, "parameters": PARAMETERS}} for name in names
    ]


async def post(api: Api, path: str, **body: Any) -> Any:
    reply = await api.client.post(path, json={"model": "fake", **body})
    assert reply.status_code == 200, reply.text
    return reply


async def of_chat(api: Api, streamed: bool, names: tuple[str, ...]) -> Said:
    body = {"messages": [USER], "tools": chat_tools(names), "stream": streamed}
    reply = await post(api, CHAT, **body)
    parts = data_of(reply) if streamed else [reply.json()]
    found, calls = Said(), {}
    for choice in (part["choices"][0] for part in parts if part["choices"]):
        message = choice["delta"] if streamed else choice["message"]
        found.text += message.get("content") or ""
        found.thinking += message.get("reasoning_content") or ""
        for index, call in enumerate(message.get("tool_calls", ())):
            place = calls.setdefault(call.get("index", index), ["", ""])
            place[0] += call["function"].get("name", "")
            place[1] += call["function"]["arguments"]
        found.reason = {"tool_calls": "calls"}.get(choice["finish_reason"], choice["finish_reason"])
    found.calls = [(name, json.loads(arguments)) for name, arguments in calls.values()]
    return found


async def of_messages(api: Api, streamed: bool, names: tuple[str, ...]) -> Said:
    tools = [{"name": name, "input_schema": PARAMETERS} for name in names]
    body = {"messages": [USER], "max_tokens": 500, "tools": tools, "stream": streamed}
    reply = await post(api, "/v1/messages", **body)
    message: Json = {} if streamed else reply.json()
    for event in (json.loads(e["data"]) for e in events_of(reply.text)) if streamed else ():
        if event["type"] == "message_start":
            message = event["message"]
        elif event["type"] == "content_block_start":
            message["content"].append({**event["content_block"], "json": ""})
        elif event["type"] == "content_block_delta":
            delta = event["delta"]
            kind = delta["type"].replace("_delta", "")
            name = {"input_json": "json"}.get(kind, kind)
            value = delta["partial_json" if name == "json" else name]
            message["content"][event["index"]][name] += value
        elif event["type"] == "message_delta":
            message["stop_reason"] = event["delta"]["stop_reason"]
    found = Said(reason={"tool_use": "calls"}.get(message["stop_reason"], "stop"))
    for block in message["content"]:
        if block["type"] == "tool_use":
            found.calls.append(
                (block["name"], json.loads(block.get("json") or "null") or block["input"])
            )
        elif block["type"] == "thinking":
            found.thinking += block["thinking"]
        else:
            found.text += block["text"]
    return found


async def of_responses(api: Api, streamed: bool, names: tuple[str, ...]) -> Said:
    tools = [{"type": "function", "name": name, "parameters": PARAMETERS} for name in names]
    reply = await post(api, "/v1/responses", input="Hi", tools=tools, stream=streamed)
    output = [] if streamed else reply.json()["output"]
    grown = ""
    for event in (json.loads(e["data"]) for e in events_of(reply.text)) if streamed else ():
        if event["type"].endswith(".delta"):
            grown += event["delta"]
        elif event["type"] == "response.output_item.done":
            item = event["item"]
            content = item.get("content") or [{"text": ""}]
            assert grown == item.get("arguments", content[0]["text"])
            output.append(item)
            grown = ""
    found = Said()
    for item in output:
        if item["type"] == "function_call":
            found.calls.append((item["name"], json.loads(item["arguments"])))
        elif item["type"] == "reasoning":
            found.thinking += item["content"][0]["text"]
        else:
            found.text += item["content"][0]["text"]
    found.reason = "calls" if found.calls else "stop"
    return found


async def of_ollama(api: Api, streamed: bool, names: tuple[str, ...]) -> Said:
    body = {"messages": [USER], "tools": chat_tools(names), "stream": streamed}
    reply = await post(api, "/api/chat", **body)
    found = Said()
    for line in map(json.loads, reply.text.splitlines()):
        message = line["message"]
        found.text += message["content"]
        found.thinking += message.get("thinking", "")
        calls = (call["function"] for call in message.get("tool_calls", ()))
        found.calls += [(call["name"], call["arguments"]) for call in calls]
    found.reason = "calls" if found.calls else "stop"
    return found


READERS = {
    "chat": of_chat,
    "messages": of_messages,
    "responses": of_responses,
    "ollama": of_ollama,
}


async def check(
    api: Api, pieces: list[str], expected: Said, names: tuple[str, ...] = NAMES
) -> None:
    """In every protocol, whole, token by token and character by character."""
    for protocol in PROTOCOLS:
        for cut, streamed in ((pieces, False), (pieces, True), (list("".join(pieces)), True)):
            found = await ask(api, protocol, cut, streamed=streamed, names=names)
            assert found == expected, (protocol, streamed, len(cut))


def turn(tokenizer: Any, message: Json) -> list[str]:
    """The assistant's turn as the template writes it, in the texts that the engine makes of it."""
    texts = []
    for messages in ([USER], [USER, {"role": "assistant", **message}]):
        taken, tools = for_template(tokenizer, messages, chat_tools(NAMES))
        shown = [each.message for each in taken]
        is_asked = len(messages) == 1
        texts.append(render_chat(tokenizer, shown, tools, add_generation_prompt=is_asked))
    before, written = texts
    assert written.startswith(before)
    # a token that ends the turn ends an answer, and has no text
    rest = written[len(before) :].removesuffix(tokenizer.eos_token).removesuffix("\n")
    rest = re.sub(r"(<\|(im_end|end|eot_id|call)\|>|<｜end▁of▁sentence｜>)$", "", rest)
    stream = TextStream(tokenizer, (), shown_markers(tokenizer, ()))
    ids = tokenizer.encode(rest, add_special_tokens=False)
    return [*(stream.push(each) for each in ids), stream.flush()]


def history(text: str, *calls: tuple[str, Json], thinking: str = "") -> Json:
    called = [
        {"id": f"call0000{i}", "type": "function", "function": {"name": n, "arguments": a}}
        for i, (n, a) in enumerate(calls)
    ]
    thought = {"reasoning_content": thinking} if thinking else {}
    return {"content": text, **({"tool_calls": called} if called else {}), **thought}


SHAPES = {
    "text": said("It is there."),
    "call": said("", FIND),
    "text and call": said("Let me check.", FIND),
    "text and two calls": said("Let me check.", FIND, STOP),
    "thinking, text, call": said("Let me check.", FIND, thinking="Hm.\n\nWhere?"),
}
# these write no text beside calls, or one call only
CALLS_ALONE = ("llama3", "mistral_list")
THINKS = ("glm", "mistral_args", "gpt_oss")
# the first two are described their tools by the server
TEMPLATES = ("built-in", "chatml", "phi3", "qwen2", "qwen3", "llama3", "qwen3_coder", "glm",
             "deepseek_r1", "deepseek_v31", "mistral_list", "mistral_args", "gpt_oss")  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("template", TEMPLATES)
async def test_a_history_is_read_back(api: Api, tokenizer: Any, template: str, shape: str) -> None:
    used = tokenizer if template == "built-in" else shaped_like(tokenizer, template)
    given = SHAPES[shape]
    expected = said(given.text, *given.calls, thinking=given.thinking)
    if template not in THINKS:
        expected.thinking = ""
    if template in CALLS_ALONE and given.calls:
        expected.text = ""
        expected.calls = given.calls[:1] if template == "llama3" else given.calls
    pieces = turn(used, history(given.text, *given.calls, thinking=given.thinking))
    await check(api, pieces, expected)


@pytest.mark.parametrize("template", [each for each in TEMPLATES if each != "llama3"])
async def test_an_unknown_call_stays_text_beside_a_known_one(
    api: Api, tokenizer: Any, template: str
) -> None:
    used = tokenizer if template == "built-in" else shaped_like(tokenizer, template)
    pieces = turn(used, history("", ("other", {"what": "x"}), STOP))
    for protocol in PROTOCOLS:
        found = await ask(api, protocol, pieces, streamed=True)
        assert found.calls == [STOP]
        assert "other" in found.text
        alone = await ask(api, protocol, pieces, streamed=False, names=("nothing",))
        assert (alone.calls, alone.reason) == ([], "stop")
        assert "other" in alone.text
        assert "stop" in alone.text


CALL = json.dumps({"name": "find", "arguments": ARGUMENTS}, ensure_ascii=False)
HALT = '{"name": "stop", "arguments": {}}'
OTHER = '{"name": "other", "arguments": {}}'
XML = "<function=find>\n<parameter=what>\n7\n</parameter>\n<parameter=n>7</parameter>\n</function>"
CODE = f"```python\nx = [\n{CALL}]\n```"
FOUND: tuple[str, Json] = ("find", {"what": "7", "n": 7})
# what models write besides their templates
WRITTEN: dict[str, tuple[str, Said]] = {
    "text in front": (
        f"Let me check.\n<tool_call>{CALL}</tool_call>",
        said("Let me check.", FIND),
    ),
    "text behind": (f"<tool_call>{CALL}</tool_call>\nDone.", said("Done.", FIND)),
    "text around": (f"First.\n\n{CALL}\n\nThen.", said("First.\n\nThen.", FIND)),
    "thinking": (f"<think>\nHm. </think>\n\n{CALL}", said("", FIND, thinking="Hm.")),
    "thinking alone": ("<think>Hm.</think>\n\nYes.", said("Yes.", thinking="Hm.")),
    "thinking of a call": (f"<think>{CALL}</think>No.", said("No.", thinking=CALL)),
    "no thinking": (f"<think>\n\n</think>\n\n{HALT}", said("", STOP)),
    "cut while thinking": ("<think>Hm", said("", thinking="Hm")),
    "no end tag": (f"<tool_call>\n{CALL}\n", said("", FIND)),
    "no end tag between": (f"<tool_call>{CALL}\n<tool_call>{HALT}", said("", FIND, STOP)),
    "two in one tag": (f"<tool_call>{CALL}\n{HALT}</tool_call>", said("", FIND, STOP)),
    "list": (f"[{CALL}, {HALT}]", said("", FIND, STOP)),
    "list in a tag": (f"<tool_call>[{CALL}, {HALT}]</tool_call>", said("", FIND, STOP)),
    "fence": (f"So:\n```json\n{CALL}\n```", said("So:", FIND)),
    "list in a fence": (f"```\n[{CALL},\n {HALT}]\n```\nSo.", said("So.", FIND, STOP)),
    "tag in a fence": (f"```xml\n<tool_call>\n{CALL}\n</tool_call>\n```", said("", FIND)),
    "open fence": (f"```json\n{CALL}", said("", FIND)),
    "one unknown": (
        f"<tool_call>{OTHER}</tool_call>\n<tool_call>{HALT}</tool_call>",
        said(f"<tool_call>{OTHER}</tool_call>", STOP),
    ),
    "one unknown in a list": (f"[{HALT}, {OTHER}]", said(OTHER, STOP)),
    "a tag in the text": (
        f"A <tool_call> is:\n<tool_call>{HALT}</tool_call>",
        said("A <tool_call> is:", STOP),
    ),
    "broken, then whole": (
        f'<tool_call>{{"name": "find", "x}}</tool_call>\n<tool_call>{HALT}</tool_call>',
        said('<tool_call>{"name": "find", "x}</tool_call>', STOP),
    ),
    "Llama's parameters": (CALL.replace("arguments", "parameters"), said("", FIND)),
    "Llama's type": (f'{{"type": "function", {CALL[1:]}', said("", FIND)),
    "Llama's semicolon": (f"{CALL}; {HALT}", said("", FIND, STOP)),
    "Llama's tag": (f"<|python_tag|>{CALL}<|eom_id|>", said("", FIND)),
    "Llama's built-in tools": ('<|python_tag|>find.call(what="7", n=7)', said("", FOUND)),
    "Llama's function": ('<function=find>{"what": "7", "n": 7}</function>', said("", FOUND)),
    "OpenAI's form": (f'{{"type": "function", "function": {CALL}}}', said("", FIND)),
    "Qwen3-Coder": (f"So.\n<tool_call>\n{XML}\n</tool_call>", said("So.", FOUND)),
    "Qwen3-Coder without its tag": (f"So.\n{XML}\n</tool_call>", said("So.", FOUND)),
    "Mistral": (f"[TOOL_CALLS] [{CALL}]", said("", FIND)),
    "Mistral's ids": (
        '[TOOL_CALLS]find[CALL_ID]abc[ARGS]{"what": "7", "n": 7}',
        said("", FOUND),
    ),
    "Gemma": ('```tool_code\nprint(find(what="7", n=7))\n```', said("", FOUND)),
    "Gemma's list": ('```tool_code\n[find(what="7", n=7), stop()]\n```', said("", FOUND, STOP)),
    "harmony": (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>commentary "
        "to=functions.stop <|constrain|>json<|message|>{}<|call|>",
        said("", STOP, thinking="Hm."),
    ),
    "a parameter's end twice": (
        XML.replace("\n<parameter=n>", "</parameter>\n<parameter=n>"),
        said("", FOUND),
    ),
    "a brace too many": (f"<tool_call>\n{CALL}}}\n</tool_call>\nSo.", said("So.", FIND)),
    "a brace too many in both": (
        f"<tool_call>{CALL}}}</tool_call>\n<tool_call>{HALT} }}</tool_call>",
        said("", FIND, STOP),
    ),
    "a brace of the text": (f"<tool_call>{CALL}\n}} So.", said("} So.", FIND)),
    "JSON that is no call": ('{"name": "find"}', said('{"name": "find"}')),
    "JSON with a call in it": (f'{{"calls": [{CALL}]}}', said(f'{{"calls": [{CALL}]}}')),
    "code with a call": (
        f"```python\nx = [\n{CALL}]\n```",
        said(f"```python\nx = [\n{CALL}]\n```"),
    ),
    "a call in a sentence": (f"I call {CALL}.", said(f"I call {CALL}.")),
    "cut off": ("<tool_call>" + CALL[:-1], said("<tool_call>" + CALL[:-1])),
    "other tags": ("a </think> <b>c</b> <|end|>", said("a </think> <b>c</b> <|end|>")),
}


@pytest.mark.parametrize("form", WRITTEN)
async def test_what_models_write(api: Api, form: str) -> None:
    text, expected = WRITTEN[form]
    await check(api, re.findall(r"(?s).{1,7}", text), expected)


@pytest.mark.parametrize("form", WRITTEN)
async def test_without_tools_nothing_is_a_call(api: Api, form: str) -> None:
    text, _ = WRITTEN[form]
    api.core.script = (FILTERED, *text)
    message = (await api.post(CHAT)).json()["choices"][0]["message"]
    assert "tool_calls" not in message
    if not text.startswith(("<think>", "<|channel|>")):
        assert message["content"] == text


async def test_thinking_that_the_prompt_begins(api: Api, tokenizer: Any) -> None:
    """The templates of DeepSeek R1 and of thinking Qwens end with the tag."""
    template = api.serving.builder.tokenizer.chat_template
    api.serving.builder.tokenizer.chat_template = template + "<think>\n"
    try:
        await check(api, ["Hm", ".\n</thi", "nk>\n\nYes."], said("Yes.", thinking="Hm."))
    finally:
        api.serving.builder.tokenizer.chat_template = template


async def test_thinking_is_counted_and_streamed_in_order(api: Api) -> None:
    api.core.script = (FILTERED, "<think>", "a", "b", "</think>", "c")
    reply = (await post(api, "/v1/responses", input="Hi")).json()
    assert [item["type"] for item in reply["output"]] == ["reasoning", "message"]
    assert reply["usage"]["output_tokens_details"] == {"reasoning_tokens": 4}
    parts = [part["choices"][0]["delta"] for part in data_of(await api.post(CHAT, stream=True))]
    assert [part["reasoning_content"] for part in parts if "reasoning_content" in part] == [
        "a",
        "b",
    ]


BEGINNINGS = (
    *("{", "<tool_call>", '<tool_call>{"a', '\n{"name":"find","x":"', "```\n", "\n[", "\n"),
    *('[{"name":"find","arguments":{}},', "<|channel|>", "<function=find><parameter=x>"),
    "```tool_code\n",
)


def test_reading_takes_linear_time() -> None:
    """Texts that begin like a call again and again, one character at a time."""
    calls = ToolCallRules(names=frozenset(NAMES), is_forced=False, is_named=False, is_parallel=True)
    rules = AnswerRules(calls=calls, has_markers=True)
    for beginning in BEGINNINGS:
        took_s = []
        for length in (10_000, 40_000):
            text = (beginning * length)[:length]
            reader, began_s = rules.reader(), time.process_time()
            said = [piece for character in text for piece in reader.push(character)]
            said += reader.finish()
            took_s.append(time.process_time() - began_s)
            if not reader.calls:
                assert "".join(piece.text for piece in said) == text
        assert took_s[1] < 10 * took_s[0] + 0.1, beginning


async def test_markers_are_shown_in_free_chats_alone(api: Api) -> None:
    """Completions have the text of a model as it is, and a grammar's text has no markers."""
    await api.post(CHAT)
    await api.post(COMPLETIONS)
    await api.post(CHAT, response_format={"type": "json_object"})
    assert [request.shows_markers for request in api.core.requests] == [True, False, False]
