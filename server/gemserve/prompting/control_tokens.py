"""Control tokens are the chat template's to write: a message that spells one has written text.

A tokenizer finds "<|user|>" wherever it stands, so a question, or a document quoted in it, could
end its own turn and open one of the system's.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any


@dataclass(frozen=True, slots=True)
class Spelled:
    """In place of a `tokenizers.Encoding`: a token's `offsets` are a range of characters."""

    ids: list[int]
    offsets: list[tuple[int, int]]

    def __len__(self) -> int:
        return len(self.ids)


def control_ids(tokenizer: Any) -> set[int]:
    """The tokens that the tokenizer calls special."""
    added = tokenizer.backend_tokenizer.get_added_tokens_decoder()
    return {index for index, token in added.items() if token.special}


def spell_out(
    tokenizer: Any, text: str, encoding: Any, places: Sequence[tuple[int, int, int]]
) -> Any:
    """`encoding` of `text`, but control tokens within `places` replaced by those of their spelling.

    The same object if there are none; all other tokens are left as they are. `places`: (index,
    start, end) in characters, ascending. Control tokens are those the tokenizer calls special: of
    other added ones, such as <think>, a message may make use.
    """
    backend = tokenizer.backend_tokenizer
    control = control_ids(tokenizer)
    ids: list[int] = encoding.ids
    forged = [
        index
        for index, token in enumerate(ids)
        if token in control and _is_within(places, text, encoding.token_to_chars(index))
    ]
    if not forged:
        return encoding

    @cache  # a text of nothing else has many of them
    def spelling(said: str) -> list[int]:
        spelled = _plain_ids(backend, said)
        if control.isdisjoint(spelled):
            return spelled
        # a vocabulary that has it as a word too
        return [token for character in said for token in _plain_ids(backend, character)]

    offsets = encoding.offsets
    found = Spelled([], [])
    at = 0
    for index in forged:
        low, high = offsets[index]
        spelled = spelling(text[low:high])
        found.ids.extend(ids[at:index] + spelled)
        found.offsets.extend(offsets[at:index] + [(low, high)] * len(spelled))
        at = index + 1
    found.ids.extend(ids[at:])
    found.offsets.extend(offsets[at:])
    return found


def _is_within(
    places: Sequence[tuple[int, int, int]], text: str, characters: tuple[int, int] | None
) -> bool:
    """None: of no text, as a BOS that the tokenizer adds."""
    if characters is None:
        return False
    low, high = characters
    said = text[low:high]  # some tokens take the blanks around them, whosever these are
    low, high = low + len(said) - len(said.lstrip()), high - len(said) + len(said.rstrip())
    before = bisect_right(places, low, key=lambda place: place[1])
    return before > 0 and high <= places[before - 1][2]


def _plain_ids(backend: Any, text: str) -> list[int]:
    """As the tokenizer would have it if it knew no added tokens."""
    # its parts one by one: the switch for this (`encode_special_tokens`) is shared by all threads
    if backend.normalizer is not None:
        text = backend.normalizer.normalize_str(text)
    pieces = [text]
    if backend.pre_tokenizer is not None:
        pieces = [piece for piece, _ in backend.pre_tokenizer.pre_tokenize_str(text)]
    return [token.id for piece in pieces for token in backend.model.tokenize(piece)]
