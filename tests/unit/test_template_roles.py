"""Roles and orders that a chat template refuses, and what becomes of the messages then."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest

from gemserve.errors import RequestError
from gemserve.prompting.chat_template import find_messages, render_chat
from gemserve.prompting.prompt import chat_prompt
from gemserve.prompting.template_roles import (
    _calls_apart,
    _short_ids,
    fit_roles,
    source_places,
)
from gemserve.prompting.tools import for_template
from tests.chat_templates import FAMILIES, shaped_like

RAISE = "{{ raise_exception('%s') }}"
TURNS = "<|{{ m.role }}|>{{ m.content }}<|end|>"
SHOWS = f"{{% for m in messages %}}{TURNS}{{% endfor %}}<|assistant|>"
# each refuses one thing that others accept
STRICT = {
    "no developer": (
        "{% for m in messages %}{% if m.role == 'developer' %}"
        + RAISE % "Unknown role"
        + "{% endif %}"
        + TURNS
        + "{% endfor %}<|assistant|>"
    ),
    "drops others": (
        "{% for m in messages %}{% if m.role in ['system', 'user', 'assistant'] %}"
        + TURNS
        + "{% endif %}{% endfor %}<|assistant|>"
    ),
    "system first": (
        "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
        + RAISE % "System message must be at the beginning."
        + "{% endif %}"
        + TURNS
        + "{% endfor %}<|assistant|>"
    ),
    "no system": (
        "{% for m in messages %}{% if m.role == 'system' %}"
        + RAISE % "System role not supported"
        + "{% endif %}"
        + TURNS
        + "{% endfor %}<|assistant|>"
    ),
    "takes turns": (
        "{% if messages[0].role == 'system' %}<|system|>{{ messages[0].content }}<|end|>"
        "{% set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}"
        "{% for m in turns %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        + RAISE % "Conversation roles must alternate"
        + "{% endif %}{% if m.role not in ['user', 'assistant'] %}"
        + RAISE % "Only user and assistant roles are supported!"
        + "{% endif %}"
        + TURNS
        + "{% endfor %}<|assistant|>"
    ),
}
CALLS = [
    {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": {"place": "x"}}},
    {"id": "c2", "type": "function", "function": {"name": "clock", "arguments": {}}},
]
SYSTEM, RULES, LATE = "Be brief.", "Use metres.", "The date is known."
# the order of roles that Claude Code and Codex send
CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": SYSTEM},
    {"role": "developer", "content": RULES},
    {"role": "user", "content": "Here is a file."},
    {"role": "user", "content": "Is it warm?"},
    {"role": "system", "content": LATE},
    {"role": "assistant", "content": "I look.", "tool_calls": CALLS},
    {"role": "tool", "tool_call_id": "c1", "content": "17 degrees"},
    {"role": "tool", "tool_call_id": "c2", "content": "noon"},
    {"role": "user", "content": "Well?"},
]
SAID = [SYSTEM, RULES, "Here is a file.", "Is it warm?", LATE, "I look.", "17 degrees", "noon"]


def strict(tokenizer: Any, template: str) -> Any:
    changed = copy.copy(tokenizer)
    changed.chat_template = template
    return changed


def roles(messages: Any) -> list[str]:
    return [message["role"] for message in messages]


@pytest.mark.parametrize("family", FAMILIES)
def test_what_a_template_accepts_stays_as_it_is(tokenizer: Any, family: str) -> None:
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Ho"},
        {"role": "user", "content": "Hi"},
    ]
    assert fit_roles(shaped_like(tokenizer, family), messages) is messages


def test_a_lenient_template_gets_every_role_that_it_names(tokenizer: Any) -> None:
    named = strict(tokenizer, SHOWS + "{% if 'developer' %}{% endif %}")
    assert fit_roles(named, CONVERSATION) is CONVERSATION
    assert roles(fit_roles(strict(tokenizer, SHOWS), CONVERSATION)) == [
        *("system" if role == "developer" else role for role in roles(CONVERSATION))
    ]


@pytest.mark.parametrize("family", ["chatml", "qwen2", "qwen3", "llama3"])
def test_a_developer_is_the_system(tokenizer: Any, family: str) -> None:
    """It was a role that no model knows, behind the template's own system prompt."""
    used = shaped_like(tokenizer, family)
    asked = {"role": "user", "content": "Hi"}
    texts = [
        chat_prompt(used, [{"role": role, "content": RULES}, asked]).text
        for role in ("developer", "system")
    ]
    assert texts[0] == texts[1]
    assert RULES in texts[0]
    assert "developer" not in texts[0]
    assert "You are" not in texts[0]
    shown = chat_prompt(used, [{"role": "developer", "content": RULES}, asked]).messages
    assert shown is not None
    assert shown[0].role == "developer", "the report names the role that was sent"


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("no developer", [*roles(CONVERSATION)[:1], "system", *roles(CONVERSATION)[2:]]),
        (
            "drops others",
            ["system", "system", "user", "user", "system", "assistant", *["user"] * 3],
        ),
        ("no system", ["user", "user", "assistant", "tool", "tool", "user"]),
        ("system first", ["system", "user", "user", "assistant", "tool", "tool", "user"]),
        ("takes turns", ["system", "user", "assistant", "user"]),
    ],
)
def test_only_what_is_refused_changes(tokenizer: Any, name: str, expected: list[str]) -> None:
    used = strict(tokenizer, STRICT[name])
    taken, tools = for_template(used, CONVERSATION, ())
    messages = [one.message for one in taken]
    fitted = fit_roles(used, messages, tools)
    assert roles(fitted) == expected
    text = render_chat(used, fitted)
    assert all(said in text for said in SAID)
    if "tool" not in expected:
        assert "Result of weather (c1):\n17 degrees" in text
        assert "Result of clock (c2):\nnoon" in text


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_takes_what_agents_send(tokenizer: Any, family: str) -> None:
    used = shaped_like(tokenizer, family)
    prompt = chat_prompt(used, CONVERSATION)
    shown = [said for said in SAID if said in prompt.text]
    # llama3's shows one call of a message, and no text beside it
    assert set(SAID) - set(shown) <= ({"I look."} if family == "llama3" else set())


def test_texts_are_joined_by_an_empty_line(tokenizer: Any) -> None:
    used = strict(tokenizer, STRICT["takes turns"])
    messages = [one.message for one in for_template(used, CONVERSATION, ())[0]]
    system, user, assistant, last = fit_roles(used, messages)
    assert system["content"] == f"{SYSTEM}\n\n{RULES}\n\n{LATE}"
    assert user["content"] == "Here is a file.\n\nIs it warm?"
    assert assistant["content"].startswith("I look.\n")
    assert last["content"] == (
        "Result of weather (c1):\n17 degrees\n\nResult of clock (c2):\nnoon\n\nWell?"
    )


@pytest.mark.parametrize("name", STRICT)
def test_sources_say_where_each_message_is(tokenizer: Any, name: str) -> None:
    """A merged message is one place in the rendered text, and each source a part of it."""
    used = strict(tokenizer, STRICT[name])
    messages = [one.message for one in for_template(used, CONVERSATION, ())[0]]
    fitted = fit_roles(used, messages)
    found = {
        index: message["content"][low:high]
        for message in fitted
        for index, low, high in message["sources"]
    }
    assert found == {index: message["content"] for index, message in enumerate(messages)}
    text = render_chat(used, fitted)
    places = find_messages(used, text, fitted)
    assert [text[low:high] for _, low, high in places] == [m["content"] for m in fitted]


def test_calls_as_data_stay_with_a_merged_message(tokenizer: Any) -> None:
    template = STRICT["takes turns"].replace(
        TURNS, TURNS + "{% for c in m.tool_calls or [] %}CALL {{ c.id }}{% endfor %}"
    )
    used = strict(tokenizer, template + "{# tools #}")
    messages = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "", "tool_calls": CALLS[:1]},
        {"role": "assistant", "content": "And", "tool_calls": CALLS[1:]},
        {"role": "tool", "tool_call_id": "c2", "content": "noon"},
        {"role": "tool", "tool_call_id": "zz", "content": "?"},
    ]
    prompt = chat_prompt(used, messages)
    assert "<|assistant|>And<|end|>CALL c1CALL c2<|user|>Result of clock (c2):\nnoon" in prompt.text
    assert "Result of zz:\n?" in prompt.text


def test_a_template_that_no_order_suits_refuses_as_before(tokenizer: Any) -> None:
    used = strict(tokenizer, RAISE % "Never.")
    with pytest.raises(RequestError, match=r"messages: the model's chat template refuses.*Never"):
        chat_prompt(used, CONVERSATION)


def test_a_template_that_reads_contents_is_asked_with_them(tokenizer: Any) -> None:
    """It accepts the messages, and not the marks in their place."""
    reads = "{% for m in messages %}{% if 'known' not in m.content %}" + RAISE % "x" + "{% endif %}"
    used = strict(tokenizer, reads + TURNS + "{% endfor %}")
    messages = [{"role": "user", "content": "known"}, {"role": "system", "content": "known"}]
    assert fit_roles(used, messages) is messages


def test_spelled_control_tokens_of_merged_messages_stay_text(tokenizer: Any) -> None:
    used = strict(tokenizer, STRICT["takes turns"])
    messages = [{"role": "user", "content": f"<|user|>{at}"} for at in range(3)]
    ids = list(chat_prompt(used, messages).ids)
    assert ids.count(used.convert_tokens_to_ids("<|user|>")) == 1


def test_the_question_is_the_user_s_among_merged_messages(tokenizer: Any) -> None:
    """A result that became a user's turn was taken for the question."""
    used = strict(tokenizer, STRICT["takes turns"])
    result = "Nobody lives there. " * 60 + "Who lives there?"
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "A file. " * 60},
        {"role": "user", "content": "Where is the key?"},
        {"role": "assistant", "content": "", "tool_calls": CALLS[:1]},
        {"role": "tool", "tool_call_id": "c1", "content": result},
    ]
    prompt = chat_prompt(used, messages)
    asked = [used.decode(prompt.ids[start:stop]).strip() for start, stop in prompt.question]
    assert asked == ["Where is the key?", "weather", "x"]  # and what the call is about


@pytest.mark.parametrize("name", STRICT)
def test_the_places_of_what_was_sent(tokenizer: Any, name: str) -> None:
    used = strict(tokenizer, STRICT[name].replace("m.content", "m.content | trim"))
    messages = [one.message for one in for_template(used, CONVERSATION, ())[0]]
    messages = [{**m, "content": f" \n{m['content']}"} for m in messages]
    fitted = fit_roles(used, messages)
    text = render_chat(used, fitted)
    places = source_places(find_messages(used, text, fitted), fitted, text)
    assert sorted(index for index, _, _ in places) == list(range(len(messages)))
    for index, low, high in places:
        assert text[low:high].strip() == messages[index]["content"].strip()


BESIDE_LAST = (
    "{% if messages[0].role == 'system' %}{% set rules = messages[0].content + ' ' %}"
    "{% set turns = messages[1:] %}{% else %}{% set turns = messages %}{% endif %}"
    "{% for m in turns %}{% if m.role == 'user' %}[INST]"
    "{% if loop.last and rules is defined %}{{ rules }}{% endif %}{{ m.content }}[/INST]"
    "{% elif m.role == 'tool' %}[RESULT]{{ m.content }}[/RESULT]"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
RULES_FIRST = {"role": "system", "content": "Answer in verse."}


@pytest.mark.parametrize(
    "ends",
    [
        [{"role": "assistant", "content": "Wait."}, {"role": "tool", "content": "17 degrees"}],
        [{"role": "assistant", "content": "The weather"}],
    ],
)
def test_rules_shown_beside_the_last_turn_alone(tokenizer: Any, ends: list[Any]) -> None:
    """An agent with tools lost its instructions whenever it read a result."""
    used = strict(tokenizer, BESIDE_LAST)
    asked = [RULES_FIRST, {"role": "user", "content": "How warm is it?"}]
    assert fit_roles(used, asked) == asked, "shown, so not changed"
    prompt = chat_prompt(used, [*asked, *ends])
    assert "[INST]Answer in verse.\n\nHow warm is it?[/INST]" in prompt.text
    assert prompt.messages is not None
    assert [place.role for place in prompt.messages[:2]] == ["system", "user"]


@pytest.mark.parametrize("template", [STRICT["no system"], BESIDE_LAST])
def test_rules_without_a_user(tokenizer: Any, template: str) -> None:
    """A chat of a system message alone came to nothing where only users' turns are shown."""
    prompt = chat_prompt(strict(tokenizer, template), [RULES_FIRST])
    assert "Answer in verse." in prompt.text
    assert prompt.messages is not None
    assert [place.role for place in prompt.messages] == ["system"]


def test_ids_of_calls_become_as_short_as_a_template_wants(tokenizer: Any) -> None:
    """Mistral's templates refused the ids that this server gives, and Anthropic's: each loop of
    calls ended at its second request."""
    check = (
        "{% if (ID | length) != 9 %}"
        + RAISE % "Tool call IDs should have length 9!"
        + "{% endif %}"
    )
    copied = copy.deepcopy(tokenizer)
    copied.chat_template = (
        "{% for m in messages %}{% if m.role == 'tool' %}"
        + check.replace("ID", "m.tool_call_id")
        + "<|tool|>{{ m.tool_call_id }}:{{ m.content }}<|end|>{% elif m.tool_calls %}"
        + "{% for c in m.tool_calls %}"
        + check.replace("ID", "c.id")
        + "<|call|>{{ c.id }}:{{ c.function.name }}<|end|>{% endfor %}{% else %}"
        + TURNS
        + "{% endif %}{% endfor %}"
    )
    said = _with_two_calls("call_0123456789abcdef01234567", "toolu_01A09q90qw90lq917835lq9")
    text = render_chat(copied, fit_roles(copied, said))
    first, second = (part.partition(":")[0] for part in text.split("<|call|>")[1:])
    assert len({first, second}) == 2
    assert f"<|tool|>{second}:cold<|end|><|tool|>{first}:warm<|end|>" in text


REFUSED = (
    "{% if m.tool_calls | length != 1 %}"
    + RAISE % "This model only supports single tool-calls at once!"
    + "{% endif %}"
)


@pytest.mark.parametrize("check", [REFUSED, ""])
@pytest.mark.parametrize(
    "first", ["m.tool_calls[0].function.name", "(m['tool_calls'] | first).function.name"]
)
def test_calls_come_one_by_one_where_a_template_wants_that(
    tokenizer: Any, check: str, first: str
) -> None:
    """Llama 3's templates refused histories with parallel calls; gpt-oss's shows one of them."""
    copied = copy.deepcopy(tokenizer)
    copied.chat_template = (
        "{% for m in messages %}{% if 'tool_calls' in m and m.tool_calls %}"
        + check
        + f"<|call|>{{{{ {first} }}}}<|end|>{{% else %}}"
        + TURNS
        + "{% endif %}{% endfor %}"
    )
    said = _with_two_calls("one", "two")
    changed = fit_roles(copied, said)
    text = render_chat(copied, changed)
    calls = "<|call|>of_one<|end|><|tool|>warm<|end|><|call|>of_two<|end|><|tool|>cold<|end|>"
    assert calls + "<|user|>Thanks.<|end|>" in text
    places = source_places(find_messages(copied, text, changed), changed, text)
    assert [said[index]["content"] for index, *_ in places] == ["Where?", "warm", "cold", "Thanks."]


def test_calls_that_a_template_shows_stay_together(tokenizer: Any) -> None:
    copied = copy.deepcopy(tokenizer)
    copied.chat_template = (
        "{% for m in messages %}{% if m.tool_calls %}{% set calls = m.tool_calls %}"
        "{% if m.tool_calls[0].id %}<|call|>{% endif %}"
        "{% for c in calls %}{{ c.function.name }}{% endfor %}<|end|>{% else %}"
        + TURNS
        + "{% endif %}{% endfor %}"
    )
    said = _with_two_calls("one", "two")
    assert fit_roles(copied, said) is said


def test_thousands_of_calls_are_taken_apart_soon() -> None:
    calls = [{"id": f"c{n}", "type": "function", "function": {}} for n in range(10_000)]
    said = [
        {"role": "assistant", "content": "", "tool_calls": calls, "sources": [(0, 0, 0)]},
        *({"role": "tool", "content": "", "tool_call_id": call["id"]} for call in calls[::-1]),
    ]
    began_s = time.process_time()
    changed = _calls_apart(_short_ids(said))
    assert time.process_time() - began_s < 1
    assert len(changed) == 20_000
    assert changed[2]["tool_calls"][0]["id"] == changed[3]["tool_call_id"]


def _with_two_calls(first: str, second: str) -> list[dict[str, Any]]:
    """The results come in the other order."""
    calls = [
        {"id": name, "type": "function", "function": {"name": f"of_{name}", "arguments": {}}}
        for name in (first, second)
    ]
    return [
        {"role": "user", "content": "Where?"},
        {"role": "assistant", "content": "", "tool_calls": calls},
        {"role": "tool", "content": "cold", "tool_call_id": second},
        {"role": "tool", "content": "warm", "tool_call_id": first},
        {"role": "user", "content": "Thanks."},
    ]
