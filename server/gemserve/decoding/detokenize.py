"""From token ids to text that a client may get: whole characters, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class TextStream:
    """Decodes one request's tokens as they come.

    `push` returns final text. It holds back the bytes of an unfinished character, and an end of
    the text that may become a stop string. `flush` returns the text that was held back.
    """

    def __init__(self, tokenizer: Any, stop: Sequence[str]) -> None:
        from tokenizers.decoders import DecodeStream

        self._backend = tokenizer.backend_tokenizer
        self._stream = DecodeStream(skip_special_tokens=True)
        self._stop = tuple(stop)
        self._ids: list[int] = []
        self._num_decoded = 0  # characters, before stop strings are looked for
        self._held = ""
        self.is_stopped = False
        self.stopped_by: str | None = None

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Add a token; returns new final text, possibly empty. Sets `is_stopped`, `stopped_by`.

        Without `may_stop`, stop strings are ordinary text.
        """
        self._ids.append(token_id)
        new = self._stream.step(self._backend, token_id) or ""
        self._num_decoded += len(new)
        if not may_stop:
            text, self._held = self._held + new, ""
            return text
        return self._release(new)

    def flush(self) -> str:
        """The rest of the text, without an unfinished character (which would be U+FFFD)."""
        if self.is_stopped:
            return ""
        whole: str = self._backend.decode(self._ids, skip_special_tokens=True)
        rest = self._release(whole[self._num_decoded :].rstrip("�"))
        if self.is_stopped:
            return rest
        rest += self._held
        self._held = ""
        return rest

    def _release(self, new: str) -> str:
        text = self._held + new
        hits = [(at, s) for at, s in ((text.find(s), s) for s in self._stop) if at >= 0]
        if hits:
            first, self.stopped_by = min(hits)
            self.is_stopped = True
            self._held = ""
            return text[:first]
        hold = max((_overlap(text, s) for s in self._stop), default=0)
        cut = len(text) - hold
        self._held = text[cut:]
        return text[:cut]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that `stop` begins with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
