"""Where a question's words are found in its prompt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemserve.prompting.encoding import encode
from gemserve.prompting.prompt import chat_prompt, ids_prompt, text_prompt
from gemserve.prompting.tools import Message
from gemserve.prompting.word_places import find_word_places


def places(text: str, question: str) -> list[list[int]]:
    """The characters at which the question's words begin in "text question"."""
    whole = f"{text} {question}"
    starts = np.arange(len(whole), dtype=np.int64)  # a token for each character
    at = len(whole) - len(question)
    return [found.tolist() for found in find_word_places(whole, starts, ((at, len(whole)),))]


def test_words_are_found_whole_and_in_any_case() -> None:
    found = places("The harbour. HARBOURS, a harbour-master; subharbour", "Which harbour?")
    assert found[0][:2] == [4, 25]
    assert len(found[0]) == 3  # the third is in the question
    assert len(found) == 2


def test_what_the_question_alone_has_has_its_place_there() -> None:
    (found,) = places("nothing of the kind", "gallop?")
    assert found == [len("nothing of the kind ")]


def test_a_word_counts_once_however_often_it_is_asked() -> None:
    assert len(places("bell bell", "bell, bell, Bell?")) == 1


def test_numbers_and_accents_are_words() -> None:
    found = places("Über 1,024 Kühe im März 1024", "Wie viele Kühe im März 1024?")
    by_start = {at[0] for at in found}
    assert {11, 16, 19, 24} <= by_start


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("Die Straße", "Straße"),
        ("DIE STRAẞE", "straße"),
        ("die İstanbul", "İSTANBUL"),
        ("die Եւ և", "և"),
        ("das cafe\u0301", "CAFE\u0301"),
        ("ein ΛΌΓΟΣ", "λόγος"),
    ],
)
def test_words_that_grow_in_another_case_and_accents_of_their_own_are_found(
    text: str, asked: str
) -> None:
    """They were found in the question alone, or in parts."""
    found = places(text, f"{asked}?")
    assert [text.rindex(" ") + 1, len(text) + 1] in found
    assert len(found) == 1


def test_a_word_does_not_end_before_its_accent() -> None:
    (found,) = places("cafe\u0301, e\u0301cafe", "cafe?")
    assert len(found) == 1  # in the question


def test_scripts_without_spaces_are_found_by_pairs() -> None:
    text = "灯塔看守人住在北岛。渡轮每天两班。"
    found = places(text, "灯塔在哪里？")
    assert [0, len(text) + 1] in found  # 灯塔
    assert all(at for at in found)


@pytest.mark.parametrize("question", ["", "?", "… — !", "(.*)+[a-z]{3}|\\b"])
def test_signs_are_no_words_and_no_patterns(question: str) -> None:
    for found in places("a.b (.*) z[a-z]", question):
        assert found


def test_long_texts_are_searched_in_pieces_without_losing_any() -> None:
    text = "lantern " * 40_000
    (found, *_) = places(text, "lantern?")
    assert len(found) == 40_001


def test_every_kind_of_prompt_has_them(tokenizer: Any) -> None:
    document = "The bell rings at noon. " * 40
    text = f"The lantern hangs in the tower.\n\n{document}\n\nWhere does the lantern hang?"
    ids = encode(tokenizer, text, add_special_tokens=False).ids
    messages: list[Message] = [{"role": "user", "content": text}]
    for prompt in (
        text_prompt(tokenizer, text),
        ids_prompt(tokenizer, ids),
        chat_prompt(tokenizer, messages),
    ):
        assert len(prompt.words) == 5  # where, does, the, lantern, hang
        for at in prompt.words:
            assert at.min() >= 0
            assert at.max() < len(prompt.ids)
        assert prompt.separators.blank_line
