"""Keeps messages from writing control tokens: only the chat template may.

A tokenizer finds "<|user|>" wherever it stands. So a question, or a document quoted in it, could
end the user's turn and begin a system message.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from functools import cache, lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from gemserve.prompting.encoding import TokenOffsets, token_edges
from gemserve.prompting.stopping import check_stopped

_AT_ONCE = 1 << 16  # tokens that are looked at while the interpreter lock is held


def control_ids(tokenizer: Any) -> frozenset[int]:
    """The tokens that the tokenizer calls special."""
    return _special_ids(tokenizer.backend_tokenizer)


@lru_cache(maxsize=8)
def _special_ids(backend: Any) -> frozenset[int]:
    added = backend.get_added_tokens_decoder().items()
    return frozenset(index for index, token in added if token.special)


def find_tokens(ids: Sequence[int], wanted: frozenset[int]) -> list[int]:
    """Where `ids` has one of the `wanted` tokens; ascending."""
    is_wanted = _is_one_of(wanted)
    found: list[int] = []
    for start in range(0, len(ids), _AT_ONCE):
        check_stopped()
        part = np.array(ids[start : start + _AT_ONCE], dtype=np.int64)
        is_found = is_wanted[np.minimum(part, len(is_wanted) - 1)] & (part < len(is_wanted))
        found += (start + np.flatnonzero(is_found)).tolist()
    return found


@lru_cache(maxsize=8)
def _is_one_of(wanted: frozenset[int]) -> npt.NDArray[np.bool_]:
    """For each id up to the largest of them, whether it is one."""
    is_wanted = np.zeros(max(wanted, default=0) + 1, dtype=np.bool_)
    is_wanted[list(wanted)] = True
    return is_wanted


def spell_out(
    tokenizer: Any, text: str, encoding: Any, places: Sequence[tuple[int, int, int]]
) -> Any:
    """`encoding` of `text`, with control tokens in `places` replaced by those of their spelling.

    Returns the same object if there are none. `places`: (index, start, end) in characters,
    ascending. Control tokens are those that the tokenizer calls special; a message may use other
    added tokens, such as <think>.
    """
    backend = tokenizer.backend_tokenizer
    control = control_ids(tokenizer)
    ids: list[int] = encoding.ids
    forged = []
    for index in find_tokens(ids, control):
        check_stopped()
        if _touches(places, text, encoding.token_to_chars(index)):
            forged.append(index)
    if not forged:
        return encoding

    @cache  # a hostile text may have many
    def spelling(control_text: str) -> list[int]:
        spelled = _plain_ids(backend, control_text)
        if control.isdisjoint(spelled):
            return spelled
        # the vocabulary has the same text as an ordinary token, too
        return [token for character in control_text for token in _plain_ids(backend, character)]

    starts, ends = token_edges(encoding)
    spelled_ids: list[int] = []
    counts = np.ones(len(ids), dtype=np.int64)
    at = 0
    for index in forged:
        check_stopped()
        spelled = spelling(text[starts[index] : ends[index]])
        spelled_ids += ids[at:index] + spelled
        counts[index] = len(spelled)
        at = index + 1
    return TokenOffsets(spelled_ids + ids[at:], starts.repeat(counts), ends.repeat(counts))


def _touches(
    places: Sequence[tuple[int, int, int]], text: str, characters: tuple[int, int] | None
) -> bool:
    """Has a token characters in one of `places`? `characters` None: it has no text, like a BOS."""
    if characters is None:
        return False
    low, high = characters
    token_text = text[low:high]  # some tokens include the blanks around them
    if token_text.strip():
        low += len(token_text) - len(token_text.lstrip())
        high -= len(token_text) - len(token_text.rstrip())
    before = bisect_left(places, high, key=lambda place: place[1])
    return before > 0 and low < places[before - 1][2]


def _plain_ids(backend: Any, text: str) -> list[int]:
    """The ids of `text` for a tokenizer without added tokens."""
    # step by step: the tokenizer's switch for this (`encode_special_tokens`) affects all threads
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    pieces = [text]
    if backend.pre_tokenizer is not None:
        pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    return [token.id for piece in pieces for token in backend.model.tokenize(piece)]
