"""`--chat-template`: the chat template that a server uses in place of its checkpoint's.

Base models have none, and so cannot be asked by chat until one is named.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gemserve import bounded_jinja
from gemserve.errors import ConfigError, shown

log = logging.getLogger("gemserve.loading")
NONE = "none"
MOST_BYTES = 1 << 20
# Templates by name, for models that have none. `plain` needs no special tokens: its requests
# should have `"stop": ["\nUser:"]`.
TEMPLATES: Mapping[str, str] = {
    "chatml": (
        "{% for message in messages %}"
        "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    ),
    "plain": (
        "{% for message in messages %}"
        "{{ message['role'] | capitalize }}: {{ message['content'] }}\n\n"
        "{% endfor %}"
        "{% if add_generation_prompt %}Assistant:{% endif %}"
    ),
}


def choose_chat_template(tokenizer: Any, choice: str | None) -> None:
    """Give the tokenizer the template that `choice` names.

    None: the checkpoint's own; if there is none, the log says so. "none": no template, so chats are
    refused. Otherwise one of `TEMPLATES`, one of several that the checkpoint has, or a file of
    Jinja. Raises `ConfigError` if there is no such template, or if it does not show a message.
    """
    if choice is None:
        if tokenizer.chat_template is None:
            log.warning(
                "the model has no chat template, so chats are refused: give it one with "
                "--chat-template FILE, or one of %s; none says that this is wanted",
                ", ".join(TEMPLATES),
            )
        return
    if choice == NONE:
        tokenizer.chat_template = None
        return
    tokenizer.chat_template = _template(tokenizer.chat_template, choice)
    _check(tokenizer, choice)


def _template(own: str | dict[str, str] | None, choice: str) -> str:
    named = {**TEMPLATES, **(own if isinstance(own, dict) else {})}
    if choice in named:
        return named[choice]
    path = Path(choice)
    try:
        if path.stat().st_size > MOST_BYTES:
            raise ConfigError(
                f"chat_template={choice}: has {path.stat().st_size:,} bytes, at most {MOST_BYTES:,}"
            )
        return path.read_text("utf-8")
    except FileNotFoundError as error:
        raise ConfigError(
            f"chat_template={choice}: is neither a file nor one of {', '.join([*named, NONE])}"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat_template={choice}: cannot be read ({error})") from error


def _check(tokenizer: Any, choice: str) -> None:
    """A template that cannot be used is found before the first request."""
    said = "a message to try the template"
    try:
        text = bounded_jinja.render(
            tokenizer.chat_template,
            {
                **tokenizer.special_tokens_map,
                "messages": [{"role": "user", "content": said}],
                "add_generation_prompt": True,
            },
            lambda: None,
        )
    except Exception as error:  # templates raise whatever their author chose
        raise ConfigError(f"chat_template={choice}: cannot be used: {shown(str(error))}") from error
    if said not in text:
        raise ConfigError(f"chat_template={choice}: does not show the messages' text")
