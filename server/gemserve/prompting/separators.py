"""What stands between two passages of a text that were not neighbours, as token ids."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

from gemserve.contract.prompt_parts import Separators
from gemserve.prompting.encoding import encode


@lru_cache(maxsize=16)
def separators(tokenizer: Any) -> Separators:
    """A blank line and a line's end as they follow a word in this tokenizer's texts."""
    return Separators(
        blank_line=_behind_a_word(tokenizer, "\n\n"), line_end=_behind_a_word(tokenizer, "\n")
    )


def _behind_a_word(tokenizer: Any, text: str) -> tuple[int, ...]:
    """The tokens of `text`; none if it is part of the word's token."""
    word: list[int] = encode(tokenizer, "a", add_special_tokens=False).ids
    both: list[int] = encode(tokenizer, f"a{text}", add_special_tokens=False).ids
    return tuple(both[len(word) :]) if both[: len(word)] == word else ()
