"""From messages to protected spans, on the built-in chat template and on awkward ones."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from gemserve.contract.prompt_parts import Priority
from gemserve.errors import RequestError
from gemserve.filtering.protected_budget import protected_positions
from gemserve.prompting.prompt import Prompt, chat_prompt, ids_prompt, text_prompt
from gemserve.prompting.protected import QUESTION_HEAD, QUESTION_TAIL

DOCUMENT = " ".join(f"Line {i} speaks of the river." for i in range(200))
Messages = list[dict[str, str]]


def message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def text_at(prompt: Prompt, priority: Priority) -> list[str]:
    """The text of each span of `priority`, in order of position."""
    spans = sorted(prompt.protected, key=lambda s: s.start)
    return [
        prompt.text[prompt.offsets[s.start][0] : prompt.offsets[s.stop - 1][1]]
        for s in spans
        if s.priority is priority
    ]


def protected_share(prompt: Prompt) -> float:
    n = len(prompt.ids)
    return len(protected_positions(prompt.protected, n, n)) / n


def assert_sound(prompt: Prompt) -> None:
    assert all(0 <= s.start < s.stop <= len(prompt.ids) for s in prompt.protected)
    assert protected_positions(prompt.protected, len(prompt.ids), 1) == [0]


def test_a_text_prompt_begins_with_bos_and_protects_its_ends(tokenizer: Any) -> None:
    prompt = text_prompt(tokenizer, DOCUMENT)
    assert prompt.ids[0] == tokenizer.bos_token_id
    assert prompt.ids[1] != tokenizer.bos_token_id
    n = len(prompt.ids)
    kept = set(protected_positions(prompt.protected, n, n))
    kept_first = min(set(range(n)) - kept)
    assert {*range(kept_first), *range(n - 32, n)} <= kept, "its end is what is asked"
    assert len(kept) <= kept_first + QUESTION_TAIL
    assert 1 < kept_first <= 1 + QUESTION_HEAD
    assert kept_first in {*prompt.breaks.paragraphs, *prompt.breaks.sentences, *prompt.breaks.lines}


def test_a_prompt_of_ids_is_taken_unaltered(tokenizer: Any) -> None:
    ids = list(range(100, 300))
    prompt = ids_prompt(tokenizer, ids)
    assert list(prompt.ids) == ids
    assert all(s.priority is not Priority.BOS for s in prompt.protected)
    with_bos = ids_prompt(tokenizer, [tokenizer.bos_token_id, *ids])
    assert with_bos.protected[0].priority is Priority.BOS
    assert ids_prompt(tokenizer, []).ids == []


def test_a_chat_has_one_bos_and_the_template_s_ids(tokenizer: Any) -> None:
    messages = [message("system", "Be brief."), message("user", "Who? 🌍 é")]
    prompt = chat_prompt(tokenizer, messages)
    theirs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True)
    assert list(prompt.ids) == list(theirs["input_ids"])
    assert list(prompt.ids).count(tokenizer.bos_token_id) == 1
    assert_sound(prompt)


def test_the_system_prompt_survives_a_small_budget(tokenizer: Any) -> None:
    messages = [
        message("system", "Always answer in French."),
        message("user", DOCUMENT),
        message("assistant", "Understood."),
        message("user", "Who is the mayor?"),
    ]
    prompt = chat_prompt(tokenizer, messages)
    assert_sound(prompt)
    assert text_at(prompt, Priority.SYSTEM) == ["Always answer in French."]
    assert text_at(prompt, Priority.QUESTION)[0] == "Who is the mayor?"
    budget = len(prompt.ids) // 4
    kept = sorted(protected_positions(prompt.protected, len(prompt.ids), budget))
    text = tokenizer.decode([prompt.ids[p] for p in kept])
    for part in ("Always answer in French.", "Who is the mayor?", "<|user|>", "<|assistant|>"):
        assert part in text
    assert "river" not in text


def test_developer_is_system_and_an_old_result_is_a_document(tokenizer: Any) -> None:
    messages = [
        message("developer", "Use the tool."),
        message("user", "Weather?"),
        message("assistant", "calling"),
        message("tool", '{"celsius": 21}'),
        message("user", "So?"),
    ]
    prompt = chat_prompt(tokenizer, messages)
    assert text_at(prompt, Priority.SYSTEM) == ["Use the tool."]
    assert text_at(prompt, Priority.QUESTION)[0] == "So?"
    n = len(prompt.ids)
    free = set(range(n)) - set(protected_positions(prompt.protected, n, n))
    said = tokenizer.decode([prompt.ids[position] for position in sorted(free)])
    assert said == 'Weather?calling{"celsius": 21}', "old turns, a result among them"


def test_a_chat_that_ends_in_a_tool_result_keeps_result_and_question(tokenizer: Any) -> None:
    messages = [message("user", "Weather?"), message("tool", "21 degrees")]
    prompt = chat_prompt(tokenizer, messages)
    assert text_at(prompt, Priority.TOOLS) == ["21 degrees"]
    assert "Weather?" in text_at(prompt, Priority.QUESTION)


def test_a_last_turn_that_is_the_document_is_protected_at_its_ends_only(tokenizer: Any) -> None:
    content = f"{DOCUMENT}\n\nWho is the mayor?"
    prompt = chat_prompt(tokenizer, [message("system", "Be brief."), message("user", content)])
    assert_sound(prompt)
    n = len(prompt.ids)
    assert len(protected_positions(prompt.protected, n, n)) < QUESTION_HEAD + QUESTION_TAIL + 24
    kept = text_at(prompt, Priority.QUESTION)
    assert kept[0].endswith("Who is the mayor?")
    assert kept[-1].endswith("<|assistant|>")


def test_the_middle_of_earlier_turns_is_free(tokenizer: Any) -> None:
    messages = [message("user", DOCUMENT), message("assistant", DOCUMENT), message("user", "Hi?")]
    assert protected_share(chat_prompt(tokenizer, messages)) < 0.05


def test_messages_with_equal_content_are_told_apart(tokenizer: Any) -> None:
    messages = [
        message("user", "Say it again."),
        message("system", "Say it again."),
        message("assistant", "Say it again."),
        message("user", "Say it again."),
    ]
    prompt = chat_prompt(tokenizer, messages)
    assert_sound(prompt)
    (system,) = [s for s in prompt.protected if s.priority is Priority.SYSTEM]
    assert prompt.text[: prompt.offsets[system.start][0]].endswith("<|system|>")
    question = min(s.start for s in prompt.protected if s.priority is Priority.QUESTION)
    assert prompt.text[: prompt.offsets[question][0]].count("Say it again.") == 3


@pytest.mark.parametrize(
    "content",
    [
        "  \n Who?  \n\n",
        "Who?\n",
        "\tWho?",
    ],
)
def test_white_space_around_a_message_does_not_lose_it(tokenizer: Any, content: str) -> None:
    prompt = chat_prompt(tokenizer, [message("system", content), message("user", content)])
    assert_sound(prompt)
    assert [t.strip() for t in text_at(prompt, Priority.SYSTEM)] == ["Who?"]
    assert text_at(prompt, Priority.QUESTION)[0].strip() == "Who?"


@pytest.mark.parametrize("empty", ["", "   ", "\n"])
def test_an_empty_message_protects_nothing_of_its_neighbours(tokenizer: Any, empty: str) -> None:
    messages = [message("system", empty), message("user", DOCUMENT), message("assistant", empty)]
    prompt = chat_prompt(tokenizer, [*messages, message("user", "Hi?")])
    assert_sound(prompt)
    assert "".join(text_at(prompt, Priority.SYSTEM)).strip() == ""
    assert protected_share(prompt) < 0.05


@pytest.mark.parametrize(
    "content",
    ["user", "assistant", "s", "<|", "begin"],
)
def test_a_message_that_reads_like_the_template_is_found_in_its_place(
    tokenizer: Any, content: str
) -> None:
    prompt = chat_prompt(tokenizer, [message("system", content), message("user", DOCUMENT)])
    (system,) = [s for s in prompt.protected if s.priority is Priority.SYSTEM]
    assert prompt.text[: prompt.offsets[system.start][0]] == "<|begin|><|system|>"


def test_rules_the_template_leaves_out_do_not_claim_the_document(
    tokenizer: Any,
) -> None:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = (
        "{% for m in messages %}{% if m.role != 'system' %}<|user|>{{ m.content }}<|end|>"
        "{% endif %}{% endfor %}<|assistant|>"
    )
    messages = [message("system", "Line 150 speaks of the river."), message("user", DOCUMENT)]
    prompt = chat_prompt(changed, messages)
    assert text_at(prompt, Priority.SYSTEM) == ["Line 150 speaks of the river."]
    assert prompt.text.startswith("<|user|>Line 150 speaks of the river.\n\nLine 0"), "moved"
    assert protected_share(prompt) < 0.15


@pytest.mark.parametrize("role", ["user", "assistant"])
def test_a_message_the_template_rewrites_stays_open_to_the_filter(
    tokenizer: Any, role: str
) -> None:
    """Protected whole, it would fill the budget and leave nothing to choose."""
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = (
        "{% for m in messages %}<|user|>{{ m.content | upper }}<|end|>{% endfor %}<|assistant|>"
    )
    prompt = chat_prompt(changed, [message(role, DOCUMENT), message("user", "12?")])
    assert protected_share(prompt) < 0.5


def test_white_space_without_end_is_not_scaffolding(tokenizer: Any) -> None:
    spaces = " \n" * 3000
    messages = [message("user", f"{DOCUMENT}{spaces}"), message("user", "Hi?")]
    assert protected_share(chat_prompt(tokenizer, messages)) < 0.5


def test_characters_of_several_tokens_do_not_shift_the_spans(tokenizer: Any) -> None:
    messages = [
        message("user", "🌍👩‍👩‍👧‍👦" * 40),
        message("system", "漢字é"),
        message("user", "Où? 🇨🇭"),
    ]
    prompt = chat_prompt(tokenizer, messages)
    assert text_at(prompt, Priority.SYSTEM) == ["漢字é"]
    assert text_at(prompt, Priority.QUESTION)[0] == "Où? 🇨🇭"


def test_a_template_that_refuses_is_the_caller_s_error(tokenizer: Any) -> None:
    changed = copy.deepcopy(tokenizer)
    changed.chat_template = "{{ raise_exception('roles must alternate') }}"
    with pytest.raises(RequestError, match="roles must alternate") as caught:
        chat_prompt(changed, [message("user", "Hi")])
    assert caught.value.param == "messages"
    changed.chat_template = None
    with pytest.raises(RequestError, match="no chat template"):
        chat_prompt(changed, [message("user", "Hi")])


@pytest.mark.parametrize(
    "blank",
    ["\n\n", "\r\n\r\n", "\n  \n", "\n\n\n", "\n\u00a0\n", "\n\x0c\n", "\r\r", "\u2029\u2029"],
)
@pytest.mark.parametrize("end", ["", "\n", "\n\nAnswer:"])
def test_the_question_is_the_last_paragraph(tokenizer: Any, blank: str, end: str) -> None:
    """Whatever ends its lines; a lone "Answer:" is not one."""
    asked = "Which bell rings at noon?"
    text = "The bells ring in the morning. " * 50 + blank + asked + end
    prompt = text_prompt(tokenizer, text)
    (question,) = [s for s in prompt.protected if s.priority is Priority.QUESTION]
    said = tokenizer.decode(prompt.ids[question.start : question.stop])
    assert said.strip().startswith(asked)


def test_one_line_end_is_no_blank_line(tokenizer: Any) -> None:
    text = "The bells ring in the morning. " * 50 + "\r\nWhich bell rings at noon?"
    prompt = text_prompt(tokenizer, text)
    assert "Which bell" in "".join(text_at(prompt, Priority.QUESTION))
    assert not any(s.priority is Priority.BEFORE for s in prompt.protected), "no paragraph was seen"


@pytest.mark.parametrize("blanks", ["\n" * 60, " " * 500, "\n" * 3000])
def test_blanks_at_the_end_do_not_displace_the_question(tokenizer: Any, blanks: str) -> None:
    asked = "Which bell rings at noon?"
    text = "The bells ring in the morning. " * 50 + f"\n\n{asked}{blanks}"
    for prompt in (text_prompt(tokenizer, text), chat_prompt(tokenizer, [message("user", text)])):
        said = "".join(text_at(prompt, Priority.QUESTION))
        assert asked in said
        assert len(said) < 100
