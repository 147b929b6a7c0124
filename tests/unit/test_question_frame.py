"""What the model reads around a passage before it says how likely the question is."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from gemserve.prompting.chat_template import render_chat
from gemserve.prompting.prompt import chat_prompt, ids_prompt, text_prompt
from gemserve.prompting.question_frame import question_frame
from gemserve.types import NO_FRAME, QuestionFrame
from tests.chat_templates import FAMILIES, shaped_like

ORDER = "Write one question that the text above answers."


def with_template(tokenizer: Any, template: str | None) -> Any:
    copied = copy.deepcopy(tokenizer)
    copied.chat_template = template
    return copied


@pytest.mark.parametrize("family", FAMILIES)
def test_a_passage_and_an_order_are_a_users_turn(family: str, tokenizer: Any) -> None:
    """The question is what the model would write next: the answer to that turn."""
    changed = shaped_like(tokenizer, family)
    frame = question_frame(changed)
    passage = "The violin is in the attic."
    ids = [*frame.before, *changed(passage, add_special_tokens=False).input_ids, *frame.after]
    said = [{"role": "user", "content": f"{passage}\n\n{ORDER}"}]
    assert changed.decode(ids) == render_chat(changed, said)


def test_without_a_template_the_question_follows_a_blank_line(tokenizer: Any) -> None:
    plain = with_template(tokenizer, None)
    blank_line = tuple(plain("\n\n", add_special_tokens=False).input_ids)
    assert question_frame(plain) == QuestionFrame(before=(plain.bos_token_id,), after=blank_line)
    plain.bos_token = None
    plain = copy.deepcopy(plain)  # frames are remembered by tokenizer
    assert question_frame(plain) == QuestionFrame(before=(), after=blank_line)


@pytest.mark.parametrize(
    "template",
    [
        pytest.param("{{ raise_exception('Talk to me in Latin.') }}", id="refuses"),
        pytest.param("{{ messages[0].content }}<|user|>{{ messages[0].content }}", id="repeats"),
        pytest.param("<|user|>Nothing is shown.<|end|>", id="leaves it out"),
    ],
)
def test_a_template_that_cannot_frame_a_passage_has_no_frame(template: str, tokenizer: Any) -> None:
    """Requests to such a model are filtered as before."""
    changed = with_template(tokenizer, template)
    assert question_frame(changed) == NO_FRAME
    assert not NO_FRAME.after


def test_every_prompt_has_its_models_frame(tokenizer: Any) -> None:
    frame = question_frame(tokenizer)
    assert frame.before
    assert frame.after
    for prompt in (
        chat_prompt(tokenizer, [{"role": "user", "content": "Where is it?"}]),
        text_prompt(tokenizer, "Where is it?"),
        ids_prompt(tokenizer, [5, 6, 7]),
    ):
        assert prompt.fields["question_frame"] == frame
