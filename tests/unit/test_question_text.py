"""Where the question is in a text: a filter that looked with other tokens kept the wrong ones."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gemserve.contract.filter_options import MAX_QUESTION_TOKENS
from gemserve.contract.prompt_parts import Priority
from gemserve.prompting.prompt import Prompt, ids_prompt, text_prompt
from gemserve.prompting.question import ids_question

PARAGRAPH = "Paragraph {} speaks of the river and of the bridge. It was built by the town long ago."
DOCUMENT = "\n\n".join(PARAGRAPH.format(i) for i in range(30))
ONE_LINE = DOCUMENT.replace("\n\n", " ")
ASKED = "Where does Dr. Smith keep the violin?"
CODE = "```py\nx = 1\n\nif x:\n    print('Why?')\n```"
REASONS = "I was told about it by the keeper of the bridge. "


def asked(tokenizer: Any, prompt: Prompt) -> list[str]:
    return [str(tokenizer.decode(prompt.ids[a:b])).strip() for a, b in prompt.question]


def assert_sound(prompt: Prompt) -> None:
    """The contract of `Request.question`."""
    flat = [edge for found in prompt.question for edge in found]
    assert flat == sorted(set(flat)), "ranges touch, overlap or descend"
    assert all(0 <= edge <= len(prompt.ids) for edge in flat)
    assert sum(b - a for a, b in prompt.question) <= MAX_QUESTION_TOKENS


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (ASKED, [ASKED]),
        (f"  \n{ASKED}\n\n", [ASKED]),
        (f"{ASKED}\nAnswer:", [ASKED]),
        (f"Question: {ASKED} Answer:", [ASKED]),
        (f"{DOCUMENT}\n\n{ASKED}", [ASKED]),
        (f"{DOCUMENT}\n\n{ASKED}\n\n\n", [ASKED]),
        (f"{DOCUMENT}\r\n\r\n{ASKED}\r\n", [ASKED]),
        (f"{DOCUMENT}\n{ASKED}", [ASKED]),
        (f"{ONE_LINE}\n{ASKED.lower()}", [ASKED.lower()]),
        (f"{ONE_LINE} {ASKED}", [ASKED]),
        (f"{ONE_LINE}Where is it?", ["Where is it?"]),  # appended without a blank
        (f"{DOCUMENT}\n\n{ASKED}\nAnswer:", [ASKED]),
        (f"{DOCUMENT}\n\n{ASKED}\n\nA:", [ASKED]),
        (f"{DOCUMENT}\n\nUser: {ASKED}\nAssistant:", [f"User: {ASKED}"]),
        (f"{DOCUMENT}\n\nQuestion: {ASKED}\nThe answer is:", [ASKED]),
        (f"{DOCUMENT}\nQ: Who? A: Ann.\nQ: {ASKED} A:", [ASKED]),
        (f"{DOCUMENT}\n\n**Question:** {ASKED}\n\n**Answer:**", [ASKED]),
        (f"{DOCUMENT}\n\n{ASKED}\n\nThanks!", [ASKED, "Thanks!"]),
        (f"{DOCUMENT}\n\n{ASKED}\n\nThanks!\n\nAnn", [ASKED, "Thanks!", "Ann"]),
        (f"{DOCUMENT}\n\n{ASKED}\n\nAnswer in one word.", [ASKED, "Answer in one word."]),
        (f"{DOCUMENT}\n{ASKED}\nAnswer in one word.", [f"{ASKED}\nAnswer in one word."]),
        (
            f"{DOCUMENT}\n\n{ASKED}\n\nBe short, name the page.\n\nThank you very much!",
            [ASKED, "Be short, name the page.", "Thank you very much!"],
        ),
        (
            f"{DOCUMENT}\n\nAnswer:\n1. {ASKED}\n2. Who paints it?\n3. Where is it?",
            [f"1. {ASKED}\n2. Who paints it?\n3. Where is it?"],
        ),
        (f"{DOCUMENT}\nQuestion: {ASKED} Answer: In the year of", [ASKED]),
        (
            f"{ASKED}\n\n{DOCUMENT}\n\n“Why?”\n\nHe left at noon.",
            [ASKED, "“Why?”", "He left at noon."],
        ),
        (f"{DOCUMENT}\n\nList the bridges.", ["List the bridges."]),
        (f"{DOCUMENT}\n\nwhat is the violin worth", ["what is the violin worth"]),
        (f"{DOCUMENT}\n\n小提琴在哪里？", ["小提琴在哪里？"]),
        (f"{ASKED}\n\n{DOCUMENT}", [ASKED]),
        (f"Use the context.\nQuestion: {ASKED} \nContext: {DOCUMENT} \nAnswer:", [ASKED]),
        (f"Question: {ASKED}\nContext:\n{DOCUMENT}\n\n{ASKED}\nAnswer:", [ASKED]),
        (f"**Question:** {ASKED}\n\n**Context:**\n{DOCUMENT}", [ASKED]),
        (
            f"Context:\nQ: How?\nA: So.\nSources: {DOCUMENT}\n\nQuestion: {ASKED}\nAnswer:",
            [ASKED],
        ),
        (
            f"Question: Why?\nContext: {ONE_LINE}\nAnswer: Ann\n\nContext: {DOCUMENT}\n\n"
            f"Question: {ASKED}\nAnswer:",
            [ASKED],
        ),
        (f"{ASKED}\n{ONE_LINE}", [ASKED]),
        (f"Hello!\n\n{ASKED}\n\n{DOCUMENT}", [ASKED]),
        (f"Summarize this.\n\n{ONE_LINE}", ["Summarize this."]),
        (f"Answer from the text.\n\n{DOCUMENT}\n\n{ASKED}", [ASKED]),
        (
            f"Read the minutes of it:\n\n{DOCUMENT}\n\nI am after the mayor's vote.",
            ["Read the minutes of it:", "I am after the mayor's vote."],
        ),
        (f"{ASKED}\n\n{DOCUMENT}\n\nReturn it.", [ASKED, "Return it."]),
        (f"{DOCUMENT}\n\n{ASKED}\n\n{CODE}", [ASKED]),
        (f"{DOCUMENT}\n\n{ASKED}\n{CODE}\n", [ASKED]),
        (f"{CODE}\n\n{DOCUMENT}\n\n{CODE}\n\n{ASKED}", [ASKED]),
        (f"{ASKED}\n\nFile a:\n{CODE * 9}\n\nFile b:\n\n{CODE}", [ASKED]),
        (f"{ASKED}\n{CODE * 9}", [ASKED]),
        (f"{DOCUMENT}\n\n请说出青竹山天文台创办人的名字。", ["请说出青竹山天文台创办人的名字。"]),
        (f"{DOCUMENT}\n\n小提琴在哪里？\n\n谢谢！", ["小提琴在哪里？", "谢谢！"]),
        (f"{DOCUMENT}\n\n{ASKED}\n\n{DOCUMENT}", [ASKED]),
        (f"{DOCUMENT}\r\n\r\n{ASKED} \r\n\r\n{DOCUMENT}", [ASKED]),
        (f"{DOCUMENT}\n\n小提琴在哪里？\n\n{DOCUMENT}", ["小提琴在哪里？"]),
        # of several one cannot tell, and a document may quote one
        (
            f"{DOCUMENT}\n\n{ASKED}\n\n{DOCUMENT}\n\n{ASKED}\n\n{DOCUMENT}",
            [PARAGRAPH.format(28), PARAGRAPH.format(29)],
        ),
        (
            f"{DOCUMENT}\n\n{ONE_LINE} {ASKED}\n\n{DOCUMENT}",
            [PARAGRAPH.format(28), PARAGRAPH.format(29)],
        ),
        (DOCUMENT, [PARAGRAPH.format(28), PARAGRAPH.format(29)]),
    ],
)
def test_the_question_in_a_text(tokenizer: Any, text: str, expected: list[str]) -> None:
    prompt = text_prompt(tokenizer, text)
    assert_sound(prompt)
    assert asked(tokenizer, prompt) == expected


def test_of_a_long_question_what_it_asks_comes_first(tokenizer: Any) -> None:
    """Its last 64 tokens were all reasons."""
    text = f"{DOCUMENT}\n\n{ASKED} {REASONS * 8}"
    prompt = text_prompt(tokenizer, text)
    assert_sound(prompt)
    first, *rest = asked(tokenizer, prompt)
    assert first == ASKED
    assert rest
    assert text.strip().endswith(rest[-1])
    assert sum(b - a for a, b in prompt.question) == MAX_QUESTION_TOKENS


def test_of_a_question_without_end_its_end_is_taken(tokenizer: Any) -> None:
    prompt = text_prompt(tokenizer, f"{DOCUMENT}\n\nWhy {'and why ' * 90}?")
    assert_sound(prompt)
    assert prompt.question[-1] == (len(prompt.ids) - MAX_QUESTION_TOKENS, len(prompt.ids))


def test_a_question_in_front_is_protected_like_one_at_the_end(tokenizer: Any) -> None:
    """It was protected as a document's first words, which a small budget drops."""
    prompt = text_prompt(tokenizer, f"{ASKED}\n\n{DOCUMENT}")
    (found,) = prompt.question
    assert any(
        s.start <= found[0] and found[1] <= s.stop and s.priority is Priority.QUESTION
        for s in prompt.protected
    )


@pytest.mark.parametrize("end", ["<|end|>\n<|assistant|>\n", "<|end|><|assistant|>", "\n\n", ""])
def test_a_prompt_of_ids_is_asked_as_its_text_is(tokenizer: Any, end: str) -> None:
    text = f"<|user|>{DOCUMENT} 漢字 🌍\n\nOù est 🎻, {ASKED}{end}"
    whole = text_prompt(tokenizer, text)
    prompt = ids_prompt(tokenizer, whole.ids)
    assert_sound(prompt)
    assert asked(tokenizer, prompt) == asked(tokenizer, whole) == [f"Où est 🎻, {ASKED}"]
    assert prompt.question == whole.question


@pytest.mark.parametrize("ids", [[], [1], [10**9, 5, 10**9], list(range(300)), [0, 1, 2] * 200])
def test_ids_that_mean_nothing_are_no_error(tokenizer: Any, ids: list[int]) -> None:
    assert_sound(ids_prompt(tokenizer, ids))


def test_a_decoder_that_raises_is_no_error(tokenizer: Any) -> None:
    class Raising:
        bos_token_id = 0

        @property
        def backend_tokenizer(self) -> Any:
            raise OverflowError("out of range")

    assert ids_question(Raising(), [1, 2, 3]) == ()


CONTROL = ("<|end|>", "<|user|>", "<|begin|>")
PIECES = st.sampled_from(
    [
        *("", " ", "\n", "\n\n", "\r\n\r\n", "\u2029\u2029", "?", "？", "```", "~~~\n", "Answer:"),
        *("Q:", ASKED, PARAGRAPH, CODE, "🌍", "é\u0301", *CONTROL, "A", "x" * 300),
    ]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(PIECES | st.text(max_size=20), max_size=25).map("".join))
def test_any_text_and_its_ids(tokenizer: Any, text: str) -> None:
    prompt = text_prompt(tokenizer, text)
    assert_sound(prompt)
    for start, stop in prompt.question:
        said = str(tokenizer.decode(prompt.ids[start:stop]))
        assert said.strip("\ufffd").strip() in text
        assert not any(token in said for token in CONTROL)
    assert bool(prompt.question) or not text.strip() or "<|" in text
    assert_sound(ids_prompt(tokenizer, prompt.ids))
