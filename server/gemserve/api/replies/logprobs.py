"""Log-probabilities in OpenAI's two forms, with tokens as texts and bytes."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Any

from gemserve.api.replies.reply_types import ChatLogprobs, CompletionLogprobs, Token
from gemserve.contract.events import TokenLogprob


class TokenTexts:
    """The bytes and texts of a tokenizer's tokens."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._bytes: dict[int, bytes] = {}
        self._texts: dict[int, str] = {}

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token adds to a text; for a special token, its name."""
        if token not in self._bytes:
            self._bytes[token] = self._find_bytes(token)
        return self._bytes[token]

    def _find_bytes(self, token: int) -> bytes:
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
        """Is the token left out of texts?"""
        return token in self._added and bool(self._added[token].special)

    def text_of(self, token: int) -> str:
        """A token's text, or "bytes:" and its bytes if they are not whole characters."""
        if token not in self._texts:
            self._texts[token] = self._find_text(token)
        return self._texts[token]

    def _find_text(self, token: int) -> str:
        raw = self.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """The byte for each character of byte-level BPE, which writes printable ones as themselves."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + place): byte for place, byte in enumerate(others)}


class CompletionLogprobWriter:
    """Writes the `logprobs` of one choice of /v1/completions, part by part.

    Offsets are counted in characters.
    """

    def __init__(self, vocabulary: TokenTexts, echo: str = "") -> None:
        self._vocabulary = vocabulary
        self._echo = echo
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0

    def write(self, tokens: Sequence[tuple[int, TokenLogprob | None]]) -> CompletionLogprobs:
        """The next tokens, each with its log-probability; a prompt's first one has none."""
        text_of = self._vocabulary.text_of
        offsets: list[int] = []
        for token, _ in tokens:
            offsets.append(self._offset)
            name = text_of(token)
            # texts leave special tokens out, but an echoed prompt may spell them
            is_in_echo = self._echo.startswith(name, self._offset)
            if is_in_echo or not self._vocabulary.is_special(token):
                text = self._decoder.decode(self._vocabulary.bytes_of(token))
                # some tokenizers leave out a blank where a text begins, which is in the token
                is_left_out = not self._offset and text[:1] == " " != self._echo[:1]
                self._offset += len(text) - (is_left_out and bool(self._echo))
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


def chat_logprobs(vocabulary: TokenTexts, scored: Sequence[TokenLogprob]) -> ChatLogprobs:
    """A `logprobs` object of /v1/chat/completions."""

    def entry(token: int, logprob: float) -> Token:
        return {
            "token": vocabulary.text_of(token),
            "logprob": logprob,
            "bytes": list(vocabulary.bytes_of(token)),
        }

    return {
        "content": [
            {**entry(s.token_id, s.logprob), "top_logprobs": [entry(t, p) for t, p in s.top]}
            for s in scored
        ],
        "refusal": None,
    }
