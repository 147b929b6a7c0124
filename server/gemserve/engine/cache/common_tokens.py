"""How far two prompts are alike. No torch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gemserve.contract.prompt_parts import TokenArray

Tokens = TokenArray
_FIRST_PART = 256  # tokens


def as_tokens(ids: Sequence[int]) -> Tokens:
    return np.asarray(ids, dtype=np.int64)


def num_common(one: Tokens, other: Tokens) -> int:
    """How many tokens two prompts have in common from their beginning on."""
    count, start, size = min(len(one), len(other)), 0, _FIRST_PART
    while start < count:  # in growing parts: most prompts part early
        stop = min(count, start + size)
        is_different = one[start:stop] != other[start:stop]
        first = int(is_different.argmax())
        if is_different[first]:
            return start + first
        start, size = stop, 4 * size
    return count
