"""What a request calls its prompt and the length of its answer, for errors about KV memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gemserve.api.requests.base_bodies import ModelBody
from gemserve.api.requests.chat_form import renamed
from gemserve.errors import CapacityExceeded

_PROMPTS = ("messages", "prompt", "text", "documents", "text_2", "data_2", "items")
_ANSWERS = ("max_completion_tokens", "max_tokens")  # the newer name wins


@contextmanager
def memory_fields_named(body: ModelBody) -> Iterator[None]:
    """Have `CapacityExceeded` name the fields of `body`."""
    try:
        yield
    except CapacityExceeded as error:
        form = getattr(body, "form", None)
        chat, names = (body, {}) if form is None else (form.chat, form.names)
        prompt, answer = _given(chat, _PROMPTS) or "prompt", None
        if any(name in type(chat).model_fields for name in _ANSWERS):
            answer = renamed(_given(chat, _ANSWERS) or "max_tokens", names)
        raise error.naming(renamed(prompt, names), answer) from error


def _given(body: Any, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if getattr(body, name, None) is not None), None)
