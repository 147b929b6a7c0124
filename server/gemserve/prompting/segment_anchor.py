"""What a model reads in front of a segment of a document: the same few tokens in front of each.

A text that begins in the middle has no place for the attention that nothing deserves, and says
nothing of who speaks. The beginning of the chat template gives it both.
"""

from __future__ import annotations

from datetime import datetime
from functools import lru_cache
from typing import Any

from gemserve.errors import RequestError
from gemserve.prompting.chat_template import find_messages, render_chat
from gemserve.prompting.encoding import encode

_MOST_TOKENS = 64  # of a template that says more before the first message
_SOME_DAY = datetime(2026, 1, 1)


def segment_anchor(tokenizer: Any) -> tuple[int, ...]:
    """The tokens of the chat template in front of a single user's text.

    Without a template: the token that texts begin with, if there is one.
    """
    return _anchor(tokenizer, getattr(tokenizer, "chat_template", None))


def segment_end(tokenizer: Any) -> tuple[int, ...]:
    """The tokens of the chat template behind a single user's text, where the answer begins.

    None without a template, or if it cannot be told where they begin.
    """
    return _end(tokenizer, getattr(tokenizer, "chat_template", None))


def strftime_now(form: str) -> str:
    """For templates that say which day it is: what was read is read the same on other days."""
    return _SOME_DAY.strftime(form)


@lru_cache(maxsize=16)
def _end(tokenizer: Any, template: Any) -> tuple[int, ...]:
    if template is None:
        return ()
    messages = [{"role": "user", "content": "a"}]
    try:
        text = render_chat(tokenizer, messages)
    except RequestError:  # a template that wants something else first
        return ()
    places = find_messages(tokenizer, text, messages)
    if not places:
        return ()
    return tuple(encode(tokenizer, text[places[0][2] :], add_special_tokens=False).ids)


@lru_cache(maxsize=16)
def _anchor(tokenizer: Any, template: Any) -> tuple[int, ...]:
    known = (getattr(tokenizer, name, None) for name in ("bos_token_id", "eos_token_id"))
    first = tuple(i for i in known if i is not None)[:1]
    if template is None:
        return first
    messages = [{"role": "user", "content": "a"}]
    dated = {"strftime_now": strftime_now}
    try:
        text = render_chat(tokenizer, messages, variables=dated)
    except RequestError:  # a template that wants something else first
        return first
    places = find_messages(tokenizer, text, messages, variables=dated)
    if not places:
        return first
    ids: list[int] = encode(tokenizer, text[: places[0][1]], add_special_tokens=False).ids
    if len(ids) > _MOST_TOKENS:
        ids = [ids[0], *ids[1 - _MOST_TOKENS :]]
    return tuple(ids) or first
