"""`--chat-template`: which template a tokenizer gets, and what is said if it has none."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from gemserve.errors import ConfigError
from gemserve.model.loading.chosen_chat_template import MOST_BYTES, TEMPLATES, choose_chat_template

MESSAGES = [{"role": "user", "content": "Who keeps the lantern?"}]
OWN = "{% for message in messages %}[{{ message.content }}]{% endfor %}"


@pytest.fixture
def bare(tokenizer: Any) -> Any:
    """A tokenizer as a base model has it."""
    own, tokenizer.chat_template = tokenizer.chat_template, None
    yield tokenizer
    tokenizer.chat_template = own


def rendered(tokenizer: Any) -> str:
    return str(tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True))


def test_a_model_without_a_template_is_said_at_the_start(
    bare: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "gemserve.loading"):
        choose_chat_template(bare, None)
    assert "no chat template" in caplog.text
    assert "--chat-template" in caplog.text
    caplog.clear()
    choose_chat_template(bare, "none")
    assert (bare.chat_template, caplog.text) == (None, "")


@pytest.mark.parametrize("name", TEMPLATES)
def test_named_templates_show_messages_and_begin_the_answer(bare: Any, name: str) -> None:
    choose_chat_template(bare, name)
    assert "Who keeps the lantern?" in rendered(bare)
    assert rendered(bare).rstrip().lower().endswith(("assistant", "assistant:"))


def test_a_file_replaces_the_models_own(bare: Any, tmp_path: Path) -> None:
    (tmp_path / "own.jinja").write_text(OWN)
    choose_chat_template(bare, str(tmp_path / "own.jinja"))
    assert rendered(bare) == "[Who keeps the lantern?]"


def test_one_of_several_that_the_model_has(bare: Any) -> None:
    bare.chat_template = {"default": TEMPLATES["chatml"], "rag": OWN}
    choose_chat_template(bare, "rag")
    assert rendered(bare) == "[Who keeps the lantern?]"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{% for message in messages %}", "cannot be used"),
        ("{{ raise_exception('never') }}", "cannot be used: 'never'"),
        ("the same for everyone", "does not show the messages' text"),
        ("{#" + "x" * MOST_BYTES + "#}", "at most 1,048,576"),
    ],
)
def test_a_file_that_is_no_template_is_refused(
    bare: Any, tmp_path: Path, text: str, said: str
) -> None:
    path = tmp_path / "wrong.jinja"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        choose_chat_template(bare, str(path))
    assert str(caught.value).startswith(f"chat_template={path}: ")
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("choice", "said"),
    [("llama9", "neither a file nor one of chatml, plain, none"), (".", "cannot be read")],
)
def test_no_such_template(bare: Any, choice: str, said: str) -> None:
    with pytest.raises(ConfigError, match="chat_template=") as caught:
        choose_chat_template(bare, choice)
    assert said in str(caught.value)
