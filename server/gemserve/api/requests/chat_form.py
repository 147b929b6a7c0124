"""Requests of other protocols as chats: what they mean, and how errors name their fields."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from gemserve.api.requests.base_bodies import FilteringBody
from gemserve.api.requests.chat_body import ChatBody, Message
from gemserve.errors import ContextExceeded, RequestError

Role = Literal["system", "developer", "user", "assistant", "tool"]


@dataclass(frozen=True, slots=True)
class ChatForm:
    """A request as a chat. `names`: how the request names the fields of the chat."""

    chat: ChatBody
    names: Mapping[str, str]


class HasForm(Protocol):
    """A body of another protocol."""

    @property
    def form(self) -> ChatForm: ...


def as_chat(body: FilteringBody, **fields: Any) -> ChatBody:
    """A chat with `fields`, and the fields that `body` has in common with a chat.

    Nothing is validated again.
    """
    shared = {
        name: getattr(body, name) for name in ChatBody.model_fields if name in body.model_fields_set
    }
    return ChatBody.model_construct(**{**shared, **fields})


def plain_message(role: Role, content: str) -> Message:
    return Message.model_construct(role=role, content=content)


@contextmanager
def fields_renamed(names: Mapping[str, str]) -> Iterator[None]:
    """Have errors name the fields that were sent, not those of the chat.

    `names` maps what a field's path begins with, as a regular expression. The first match counts.
    """
    try:
        yield
    except RequestError as error:
        old = error.param
        if old is not None and isinstance(error, ContextExceeded):
            error.param, error.place = renamed(old, names), renamed(error.place, names)
            if error.detail.startswith(old):
                error.detail = error.param + error.detail.removeprefix(old)
        elif old is not None:
            error.param = renamed(old, names)
            message = str(error)
            if message.startswith(old):
                error.args = (error.param + message.removeprefix(old),)
        raise


def renamed(path: str, names: Mapping[str, str]) -> str:
    """The path of a chat's field as the request names it."""
    for pattern, name in names.items():
        found, count = re.subn(rf"^{pattern}(?=\.|$)", name, path)
        if count:
            return found
    return path
