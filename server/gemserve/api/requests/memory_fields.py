"""What a request calls its prompt and the length of its answer, for errors about KV memory."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from gemserve.api.requests.base_bodies import ModelBody
from gemserve.api.requests.chat_form import fields_renamed
from gemserve.errors import CapacityExceeded

_PROMPTS = ("messages", "prompt", "text", "documents", "text_2", "data_2", "items")
_ANSWERS = ("max_completion_tokens", "max_tokens")  # the newer name wins


@contextmanager
def memory_fields_named(body: ModelBody) -> Iterator[None]:
    """Have `CapacityExceeded` name the fields of `body`."""
    form = getattr(body, "form", None)
    chat, names = (body, {}) if form is None else (form.chat, form.names)
    with fields_renamed(names):
        try:
            yield
        except CapacityExceeded as error:
            error.param = _given(chat, _PROMPTS) or "prompt"
            takes_length = any(name in type(chat).model_fields for name in _ANSWERS)
            error.answer = (_given(chat, _ANSWERS) or "max_tokens") if takes_length else None
            raise


def _given(body: Any, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if getattr(body, name, None) is not None), None)
