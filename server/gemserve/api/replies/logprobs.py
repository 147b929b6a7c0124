"""Log-probabilities on the wire: tokens as texts and bytes, in OpenAI's two forms."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from gemserve.types import TokenLogprob

Json = dict[str, Any]


class Vocabulary:
    """What each token of a tokenizer stands for."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer

    def bytes_of(self, token: int) -> bytes:
        """The bytes a token adds to a text; of a special one, its name."""
        added = self._added.get(token)
        if added is not None:
            return str(added.content).encode()
        piece: str = self._tokenizer.convert_ids_to_tokens(token)
        if piece is None:  # a model may have more rows than its tokenizer has tokens
            return b""
        if self._is_byte_level:
            return bytes(_byte_alphabet()[character] for character in piece)
        if len(piece) == 6 and piece.startswith("<0x"):  # SentencePiece's byte fallback
            return bytes([int(piece[3:5], 16)])
        return piece.replace("▁", " ").encode()

    @cached_property
    def _added(self) -> dict[int, Any]:
        added: dict[int, Any] = self._tokenizer.added_tokens_decoder
        return added

    @cached_property
    def _is_byte_level(self) -> bool:
        return "ByteLevel" in repr(self._tokenizer.backend_tokenizer.decoder)

    def is_special(self, token: int) -> bool:
        """Is it left out of texts?"""
        return token in self._added and bool(self._added[token].special)

    def text_of(self, token: int) -> str:
        """A token's text; of one that ends inside a character, "bytes:" and those."""
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes bytes as: printable ones as themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


class CompletionLogprobs:
    """One choice's `logprobs` object of /v1/completions, piece by piece; offsets in characters."""

    def __init__(self, vocabulary: Vocabulary, echo: str = "") -> None:
        self._vocabulary = vocabulary
        self._echo = echo
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def opening(self, token: int) -> Json:
        """Of a prompt's first token, which nothing precedes."""
        return self._written([(token, None)])

    def of(self, scored: Sequence[TokenLogprob]) -> Json:
        """Of tokens that follow what was written so far."""
        return self._written([(entry.token_id, entry) for entry in scored])

    def _written(self, tokens: Sequence[tuple[int, TokenLogprob | None]]) -> Json:
        text_of = self._vocabulary.text_of
        offsets: list[int] = []
        for token, _ in tokens:
            offsets.append(self._offset)
            name = text_of(token)
            # no text shows a special token, unless it was spelled out
            is_shown = self._echo.startswith(name, self._offset)
            if is_shown or not self._vocabulary.is_special(token):
                self._offset += len(self._decoder.decode(self._vocabulary.bytes_of(token)))
        return {
            "tokens": [text_of(token) for token, _ in tokens],
            "token_logprobs": [None if e is None else e.logprob for _, e in tokens],
            "top_logprobs": [
                None
                if e is None
                else {text_of(e.token_id): e.logprob, **{text_of(t): p for t, p in e.top}}
                for _, e in tokens
            ],
            "text_offset": offsets,
        }


def chat_logprobs(vocabulary: Vocabulary, scored: Sequence[TokenLogprob]) -> Json:
    """A `logprobs` object of /v1/chat/completions."""

    def entry(token: int, logprob: float) -> Json:
        return {
            "token": vocabulary.text_of(token),
            "logprob": logprob,
            "bytes": list(vocabulary.bytes_of(token)),
        }

    content = [
        {**entry(s.token_id, s.logprob), "top_logprobs": [entry(t, p) for t, p in s.top]}
        for s in scored
    ]
    return {"content": content, "refusal": None}
