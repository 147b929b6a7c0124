"""Text to token ids and back, without holding the interpreter lock."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def encode(tokenizer: Any, text: str, *, add_special_tokens: bool) -> Any:
    """The text's `tokenizers.Encoding`."""
    # unlike `encode`, a batch of one releases the interpreter lock while it works
    backend = tokenizer.backend_tokenizer
    return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]


def decode(tokenizer: Any, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
    """The text of these tokens."""
    backend = tokenizer.backend_tokenizer  # a batch of one, as above
    text: str = backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
    return text
