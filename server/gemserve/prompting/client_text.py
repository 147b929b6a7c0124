"""Where a rendered chat shows control tokens that the client spelled, not the template.

A client's text reaches a template as messages, tools, calls, their names and arguments, and the
template's variables. No part of it may become a control token. If its place in the rendered chat
cannot be found, no text of that chat becomes one.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gemserve.errors import RequestError
from gemserve.prompting.answer_start import AnswerStart, end_of_last
from gemserve.prompting.chat_template import (
    NO_VARIABLES,
    TemplateTooLarge,
    find_messages,
    render_chat,
)
from gemserve.prompting.control_tokens import control_ids, find_tokens, spell_out
from gemserve.prompting.encoding import encode
from gemserve.prompting.tools import Message, Tool

Places = list[tuple[int, int, int]]  # (message, start, end) in characters


def encode_chat(
    tokenizer: Any,
    text: str,
    encoding: Any,
    messages: Sequence[Message],
    tools: Sequence[Tool] = (),
    *,
    start: AnswerStart = "header",
    add_special_tokens: bool = False,
    variables: Mapping[str, Any] = NO_VARIABLES,
) -> tuple[str, Any, Places]:
    """The rendered `text`, its `encoding` without control tokens of the client's, and the messages.

    The places are those of `find_messages`. If the answer starts within the last message, the text
    ends with that, and is encoded anew. Raises `RequestError` if it cannot.
    """
    add_generation_prompt = start == "header"
    inputs = _Inputs(tokenizer, messages, tools, variables, add_generation_prompt)
    places = find_messages(
        tokenizer,
        text,
        messages,
        tools,
        add_generation_prompt=add_generation_prompt,
        variables=variables,
    )
    ranges = [(low, high) for _, low, high in places]
    ranges += inputs.find_spelled(text, skips_contents=_show_all(places, messages, text))
    if start == "within":
        text = text[: end_of_last(text, messages, places)]
        encoding = encode(tokenizer, text, add_special_tokens=add_special_tokens)
    return text, spell_out(tokenizer, text, encoding, _merged(ranges)), places


class _Inputs:
    """What a client sends to a template."""

    def __init__(
        self,
        tokenizer: Any,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        variables: Mapping[str, Any],
        add_generation_prompt: bool,
    ) -> None:
        self._tokenizer = tokenizer
        self._messages, self._tools, self._variables = messages, tools, variables
        self._add_generation_prompt = add_generation_prompt
        self._control = control_ids(tokenizer)

    def find_spelled(self, text: str, *, skips_contents: bool) -> list[tuple[int, int]]:
        """Ranges of `text` that hold every control token of the inputs.

        `skips_contents`: the contents of messages need not be looked at.
        """
        hidden = {"content"} if skips_contents else set()
        messages = [{k: v for k, v in m.items() if k not in hidden} for m in self._messages]
        given = (
            *texts_within(messages),
            *texts_within(self._tools),
            *texts_within(self._variables),
        )
        found = {each: self._spelled_in(each) for each in dict.fromkeys(given)}
        spelled = {each: ranges for each, ranges in found.items() if ranges}
        if not spelled:
            return []
        marked = self._find_marked(text, spelled)
        return [(0, len(text))] if marked is None else marked

    def _spelled_in(self, text: str) -> list[tuple[int, int]]:
        """The ranges of characters where `text` spells control tokens, without blanks beside."""
        encoding = encode(self._tokenizer, text, add_special_tokens=False)
        ranges: list[tuple[int, int]] = []
        for index in find_tokens(encoding.ids, self._control):
            characters = encoding.token_to_chars(index)
            if characters is not None:
                low, high = characters
                token_text = text[low:high]
                low += len(token_text) - len(token_text.lstrip())
                ranges.append((low, low + len(token_text.strip())))
        return ranges

    def _find_marked(
        self, text: str, spelled: Mapping[str, list[tuple[int, int]]]
    ) -> list[tuple[int, int]] | None:
        """Render with a mark on each side of what is spelled, and read where the marks stand.

        Empty if the template shows none of it. None if the chat without its marks is not `text`:
        the template has looked at what it was given, or has rewritten it.
        """
        nonce = f"{secrets.randbelow(10**20):020}"  # no client can send what it cannot guess
        start, end = f"\ue000{nonce}\ue001", f"\ue000{nonce}\ue002"
        marked = {
            given: _with_marks(given, ranges, start, end) for given, ranges in spelled.items()
        }
        try:
            rendered = render_chat(
                self._tokenizer,
                _replaced(self._messages, marked),
                _replaced(self._tools, marked),
                add_generation_prompt=self._add_generation_prompt,
                variables=_replaced(self._variables, marked),
            )
        except TemplateTooLarge:
            raise
        except RequestError:
            return None
        parts = re.split(f"({start}|{end})", rendered)
        texts, marks = parts[::2], parts[1::2]
        if "".join(texts) != text:
            return None
        ranges: list[tuple[int, int]] = []
        at, opened = 0, None
        for piece, mark in zip(texts, marks, strict=False):  # the last text has no mark behind it
            at += len(piece)
            if (mark == start) != (opened is None):
                return None
            if opened is not None:
                ranges.append((opened, at))
            opened = at if mark == start else None
        return ranges if opened is None else None


def _show_all(places: Places, messages: Sequence[Message], text: str) -> bool:
    """Do the places hold every content, and as it was sent? Else one may be in the wrong place."""
    shown = {index for index, _, _ in places}
    return all(i in shown for i, message in enumerate(messages) if message["content"]) and all(
        text[low:high].strip() == messages[index]["content"].strip() for index, low, high in places
    )


def _merged(ranges: list[tuple[int, int]]) -> Places:
    """The ranges in order, without overlaps, in the form of places."""
    merged: Places = []
    for low, high in sorted(ranges):
        if merged and low < merged[-1][2]:
            merged[-1] = (0, merged[-1][1], max(high, merged[-1][2]))
        else:
            merged.append((0, low, high))
    return merged


def _with_marks(text: str, ranges: Sequence[tuple[int, int]], start: str, end: str) -> str:
    pieces: list[str] = []
    at = 0
    for low, high in ranges:
        pieces += [text[at:low], start, text[low:high], end]
        at = high
    return "".join([*pieces, text[at:]])


def texts_within(value: Any) -> Iterator[str]:
    """All texts within a JSON value, names of members too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for name, member in value.items():
            yield name
            yield from texts_within(member)
    elif isinstance(value, Sequence):
        for member in value:
            yield from texts_within(member)


def _replaced(value: Any, marked: Mapping[str, str]) -> Any:
    """A JSON value with other texts in it."""
    if isinstance(value, str):
        return marked.get(value, value)
    if isinstance(value, Mapping):
        return {marked.get(k, k): _replaced(member, marked) for k, member in value.items()}
    if isinstance(value, Sequence):
        return [_replaced(member, marked) for member in value]
    return value
