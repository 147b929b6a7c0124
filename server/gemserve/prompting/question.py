"""Finds the tokens of a prompt that ask a question: in a chat, in a text, and in token ids.

A filter ranks the prompt by what these tokens attend to. The tokens that a chat template puts after
the question attend to nothing in particular, and the end of a document attends to itself.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Collection, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from gemserve.contract.filter_options import MAX_QUESTION_TOKENS
from gemserve.prompting.chat_parts import RenderedChat
from gemserve.prompting.control_tokens import control_ids
from gemserve.prompting.encoding import IntArray, TokenOffsets
from gemserve.prompting.message_structure import request_range
from gemserve.prompting.protected import LONGEST_QUESTION
from gemserve.prompting.question_text import find_question
from gemserve.prompting.question_words import Range
from gemserve.ranges import Ranges, as_ranges

_NEAR_AN_END = 8192  # tokens at either end of a text; the rules look at fewer
_NUM_DECODED = LONGEST_QUESTION + 128  # of a prompt of token ids
# roles beside control tokens, in a chat that the client has rendered itself
_ROLE = re.compile(r"(?:system|developer|user|assistant|model|tool|ipython)[ \t]*(?=[\r\n]|$)")
_MOST_CALLED = 24  # tokens of calls that are watched beside the question
_SHORTEST_FOUND = 12  # characters of a message that do not occur in a template by chance


class _Tokens:
    """Which tokens stand for a range of characters."""

    def __init__(self, encoding: Any, num_chars: int) -> None:
        self._encoding = encoding
        self._num_chars = num_chars

    def chars(self, index: int) -> Range:
        found: Range | None = self._encoding.token_to_chars(index)
        if found is not None:
            return found
        # a token of no text, such as a BOS or an EOS that the tokenizer adds
        end = 0 if 2 * index < len(self._encoding) else self._num_chars
        return end, end

    def range(self, low: int, high: int) -> tuple[int, int]:
        """The tokens that have any of the characters low..high−1."""
        indexes = range(len(self._encoding))
        start = bisect_right(indexes, low, key=lambda i: self.chars(i)[1])
        return start, max(start, bisect_left(indexes, high, key=lambda i: self.chars(i)[0]))


def chat_question(chat: RenderedChat) -> tuple[Ranges, int]:
    """The question of the last user turn, and what the calls are about whose results follow it.

    The second value says how many tokens, the last ones, are of calls.
    """
    if chat.request is not None:
        placed = chat.request
        start, stop = request_range(chat.text[placed.low : placed.high])
        low, high = placed.low + start, placed.low + stop
        called = [index for at in chat.called() for index in range(*chat.tokens(*at))]
        called = list(dict.fromkeys(called))[:_MOST_CALLED]
        most = MAX_QUESTION_TOKENS - len(called)
        asked = _find(chat.text, low, high, chat.encoding, most=most)
        return as_ranges(sorted({*called, *(i for at in asked for i in range(*at))})), len(called)
    last = chat.messages[-1].message if chat.messages else None
    if chat.parts or last is None or last["role"] != "user":
        return (), 0
    content = last["content"].strip()  # the template repeats or changes messages
    low = chat.text.rfind(content) if len(content) >= _SHORTEST_FOUND else -1
    found = () if low < 0 else _find(chat.text, low, low + len(content), chat.encoding)
    return found, 0


def text_question(tokenizer: Any, text: str, encoding: Any) -> Ranges:
    """The question of a plain prompt. Control tokens in it count as ends of paragraphs."""
    control = control_ids(tokenizer)
    ids = encoding.ids
    ends = {*range(min(_NEAR_AN_END, len(ids))), *range(max(0, len(ids) - _NEAR_AN_END), len(ids))}
    omitted = {index for index in ends if ids[index] in control}
    text = _without_control(text, encoding, sorted(omitted))
    return _find(text, 0, len(text), encoding, is_plain=True, omitted=omitted)


def ids_question(tokenizer: Any, ids: Sequence[int]) -> Ranges:
    """The question at the end of a prompt of token ids; none if they cannot be decoded."""
    last = list(ids[-_NUM_DECODED:])
    try:
        text, offsets = _decoded(tokenizer, last)
    except (OverflowError, _TextsDisagree):  # the first: an id that no tokenizer can have
        return ()
    skipped = len(ids) - len(last)
    edges: IntArray = np.array(offsets, dtype=np.int64).reshape(-1, 2)
    found = text_question(tokenizer, text, TokenOffsets(last, edges[:, 0], edges[:, 1]))
    return tuple((start + skipped, stop + skipped) for start, stop in found)


def _find(
    text: str,
    low: int,
    high: int,
    encoding: Any,
    *,
    is_plain: bool = False,
    omitted: Collection[int] = (),
    most: int = MAX_QUESTION_TOKENS,
) -> Ranges:
    """The question in text[low:high]: at most `most` tokens, none of `omitted`."""
    tokens = _Tokens(encoding, len(text))

    def count_tokens(start: int, stop: int) -> int:
        first, end = tokens.range(low + start, low + stop)
        return end - first

    chosen: set[int] = set()
    for start, stop in find_question(text[low:high], count_tokens, is_plain=is_plain):
        for index in reversed(range(*tokens.range(low + start, low + stop))):
            first, end = tokens.chars(index)
            is_outside = (text[first:low] + text[high:end]).strip() != ""
            if len(chosen) < most and not is_outside and index not in omitted:
                chosen.add(index)
    return as_ranges(sorted(chosen))


def _without_control(text: str, encoding: Any, control: Sequence[int]) -> str:
    """`text` with line ends in place of control tokens and roles beside them; as long as before."""
    tokens = _Tokens(encoding, len(text))
    pieces: list[str] = []
    at = 0
    for low, high in map(tokens.chars, control):
        pieces += [_without_role(text[at:low], after_control=at > 0), "\n" * (high - low)]
        at = high
    return "".join([*pieces, _without_role(text[at:], after_control=at > 0)])


def _without_role(text: str, *, after_control: bool) -> str:
    role = _ROLE.match(text) if after_control else None
    return text if role is None else "\n" * role.end() + text[role.end() :]


class _TextsDisagree(Exception):
    """The text of the first tokens is not the beginning of the text of all of them."""


def _decoded(tokenizer: Any, ids: list[int]) -> tuple[str, list[Range]]:
    """The text of `ids`, and the range of characters of each."""
    backend = tokenizer.backend_tokenizer
    heads = [ids[:stop] for stop in range(1, len(ids) + 1)]
    texts: list[str] = backend.decode_batch(heads, skip_special_tokens=False)
    text = texts[-1] if texts else ""
    ends: list[int] = [0]
    for head in texts:
        start = head.rstrip("\ufffd")  # which stands for an unfinished character
        if not text.startswith(start):
            raise _TextsDisagree
        ends.append(max(ends[-1], len(start)))
    offsets = [(low, max(high, low + 1)) for low, high in pairwise(ends)]
    return text, offsets
