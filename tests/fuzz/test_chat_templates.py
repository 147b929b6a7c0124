"""Chats in every template: no text of a client becomes a control token, whatever it spells.

And templates that a model brings along: what they raise is a 400, and they reach no Python object.
"""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gemserve.errors import RequestError
from gemserve.prompting.prompt import chat_prompt
from tests.chat_templates import CONTROL_TOKENS, FAMILIES, FOLDER, shaped_like
from tests.fuzz.cases import MIB, TEXTS, bounded, cases, changed_bytes

OWN = "builtin"
ROLES = ("system", "user", "assistant", "tool")


@pytest.fixture(scope="module")
def tokenizers(tokenizer: Any) -> dict[str, Any]:
    return {OWN: tokenizer, **{name: shaped_like(tokenizer, name) for name in FAMILIES}}


def control_ids(tokenizer: Any) -> set[int]:
    return {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}


SPELLED = sorted({token for tokens in CONTROL_TOKENS.values() for token in tokens})
CONTENTS = st.lists(
    st.one_of(TEXTS, st.sampled_from([*SPELLED, " ", "\n", "<|", "|>", "<", "\ue000", "\ue001"])),
    max_size=5,
).map("".join)


@st.composite
def chats(draw: st.DrawFn) -> list[dict[str, str]]:
    number = draw(st.integers(1, 4))
    alternating = draw(st.booleans())
    messages = []
    for place in range(number):
        role = ("user", "assistant")[place % 2] if alternating else draw(st.sampled_from(ROLES))
        messages.append({"role": role, "content": draw(CONTENTS)})
    return messages


@given(st.data(), chats())
@cases(50)
def test_no_text_of_a_client_becomes_a_control_token(
    tokenizers: dict[str, Any], data: st.DataObject, messages: list[dict[str, str]]
) -> None:
    """There is none that the same chat with harmless words does not have.

    There may be fewer: a chat that cannot be located in the text has none at all.
    """
    tokenizer = tokenizers[data.draw(st.sampled_from(sorted(tokenizers)))]
    harmless = [{**m, "content": "word" if m["content"].strip() else m["content"]}
                for m in messages]  # fmt: skip
    control = control_ids(tokenizer)
    with bounded("chat", cpu_s=10):
        try:
            prompt = chat_prompt(tokenizer, messages)
            expected = chat_prompt(tokenizer, harmless)
        except RequestError:  # this order of roles
            return
    found = Counter(token for token in prompt.ids if token in control)
    allowed = Counter(token for token in expected.ids if token in control)
    assert found <= allowed, messages


BOMBS = (
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__class__.__base__ }}",
    "{{ cycler.__init__.__globals__.os.popen('true').read() }}",
    "{{ ''['__cl' ~ 'ass__'] }}",
    "{{ messages.append({'role': 'user', 'content': 'x'}) }}",
    "{% for x in range(100000000) %}{% endfor %}",
    "{{ 1 // 0 }}",
    "{{ messages[9].content }}",
    "{{ raise_exception('no') }}",
    "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "{{ '%s' % namespace }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}",
    "{{ nothing.at.all }}",
    "{% if",
)
MESSAGES = [{"role": "user", "content": "Hi"}]
REACHED = ("subclass", "root:", "built-in", "<class 'object'>", "<module")


@pytest.mark.parametrize("template", BOMBS)
def test_a_template_reaches_nothing_but_its_chat(tokenizer: Any, template: str) -> None:
    copied = copy.deepcopy(tokenizer)
    copied.chat_template = template
    messages = copy.deepcopy(MESSAGES)
    with bounded("template bomb", cpu_s=5, grown_bytes=200 * MIB):
        try:
            text = chat_prompt(copied, messages).text
        except RequestError as error:
            text = str(error) if "unsafe" not in str(error) else ""
    assert not any(word in text for word in REACHED), text
    assert messages == MESSAGES


def templates() -> Iterator[str]:
    yield from ((FOLDER / f"{family}.jinja").read_text() for family in FAMILIES)


@given(st.data())
@cases(30)
def test_a_changed_template_is_used_or_refused(tokenizer: Any, data: st.DataObject) -> None:
    whole = data.draw(st.sampled_from(list(templates()))).encode()
    copied = copy.copy(tokenizer)
    copied.chat_template = data.draw(changed_bytes(whole)).decode("utf-8", "replace")
    with bounded("changed template", cpu_s=10, grown_bytes=200 * MIB):
        try:
            prompt = chat_prompt(copied, MESSAGES)
        except RequestError as error:
            assert error.param == "messages"
            json.dumps(str(error)).encode()
        else:
            assert isinstance(prompt.text, str)
