"""From token ids to text that a client may get: whole characters, and no part of a stop string."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from gemserve.decoding.markers import NO_MARKERS

_MOST_SILENT = 8  # tokens that may be part of one character: it has four bytes at most


def token_offsets(
    tokenizer: Any,
    ids: Sequence[int],
    markers: Mapping[int, str] = NO_MARKERS,
    before: Sequence[int] = (),
) -> list[int]:
    """Where in its text each token of an answer begins, in characters. See `TextStream`."""
    stream = TextStream(tokenizer, (), markers, before)
    offsets, length = [], 0
    for token_id in ids:
        offsets.append(length)
        length += len(stream.push(token_id))
    return offsets


class TextStream:
    """Decodes one request's tokens as they come.

    `push` returns final text. It holds back the bytes of an unfinished character, and an end of
    the text that may become a stop string. `flush` returns the text that was held back.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: Sequence[str],
        markers: Mapping[int, str] = NO_MARKERS,
        before: Sequence[int] = (),
    ) -> None:
        """`markers`: special tokens whose texts are shown; all others are left out.

        `before`: the last tokens of a text that this one goes on with. At the beginning of a text
        some tokenizers leave out a blank.
        """
        self._backend = tokenizer.backend_tokenizer
        self._special = _special_ids(self._backend)
        self._markers = markers
        self._stops = [StopMatcher(each) for each in stop]
        self._held = ""
        self.is_stopped = False
        self.stopped_by: str | None = None
        self._last: list[int] = []  # the tokens of the last text
        self._begin()
        for token_id in before:
            self._decode(token_id)
        if self._undecoded():  # it ends amid a character, of which the answer is to show nothing
            self._last = []
            self._begin()

    def push(self, token_id: int, *, may_stop: bool = True) -> str:
        """Add a token; returns new final text, possibly empty. Sets `is_stopped`, `stopped_by`.

        Without `may_stop`, stop strings are ordinary text.
        """
        new = self._decode(token_id) + self._markers.get(token_id, "")
        if not may_stop:
            text, self._held = self._held + new, ""
            for stop in self._stops:
                stop.forget()
            return text
        return self._release(new)

    def flush(self) -> str:
        """The rest of the text, without an unfinished character (which would be U+FFFD)."""
        if self.is_stopped:
            return ""
        rest = self._release(self._undecoded().rstrip("�"))
        if self.is_stopped:
            return rest
        rest += self._held
        self._held = ""
        return rest

    def _begin(self) -> None:
        from tokenizers.decoders import DecodeStream

        self._stream = DecodeStream(skip_special_tokens=True)
        self._ids: list[int] = []
        self._num_decoded = self._num_silent = 0  # characters of `_ids`; tokens since the last one
        last, self._last = self._last, []
        for token_id in last:  # so that this is no beginning of a text
            self._decode(token_id)
        if self._num_silent:
            self._last = []
            self._begin()

    def _decode(self, token_id: int) -> str:
        """The characters that a token makes whole. The stream reads what has made none each time.

        So it gets no special tokens, and is not asked to make a character of many others.
        """
        if token_id in self._special:
            return ""
        self._ids.append(token_id)
        pending = self._ids[-self._num_silent - 1 :]
        try:
            new = self._stream.step(self._backend, token_id) or ""
        except Exception as error:  # it has no class of its own
            if not str(error).startswith("Invalid prefix"):
                raise
            # Byte fallback makes one text of all bytes in a row. If one of them is part of no
            # character, then the characters before it, which have been sent, are none either.
            self._last = [token_id]
            self._begin()
            return self._text_of(pending)
        self._num_decoded += len(new)
        if new:
            self._last = pending
        self._num_silent = 0 if new else self._num_silent + 1
        if self._num_silent > _MOST_SILENT:
            new = self._text_of(pending)
            self._begin()
        return new

    def _undecoded(self) -> str:
        return self._text_of(self._ids)[self._num_decoded :]

    def _text_of(self, ids: list[int]) -> str:
        text: str = self._backend.decode(ids, skip_special_tokens=True)
        return text

    def _release(self, new: str) -> str:
        text = self._held + new
        ends = [(stop.find_end(new), stop.text) for stop in self._stops]
        hits = [(len(self._held) + end - len(s), s) for end, s in ends if end is not None]
        if hits:
            first, self.stopped_by = min(hits)
            self.is_stopped = True
            self._held = ""
            return text[:first]
        hold = max((stop.num_matched for stop in self._stops), default=0)
        cut = len(text) - hold
        self._held = text[cut:]
        return text[:cut]


@lru_cache(maxsize=8)
def _special_ids(backend: Any) -> frozenset[int]:
    """The tokens that no text shows."""
    added = backend.get_added_tokens_decoder().items()
    return frozenset(token_id for token_id, token in added if token.special)


class StopMatcher:
    """Looks for one stop string in a text that comes in pieces.

    It reads every character once and compares it at most twice on average (Knuth, Morris, Pratt),
    however much of the text could be a beginning of the stop string.
    """

    def __init__(self, text: str) -> None:
        assert text
        self.text = text
        self.num_matched = 0  # characters at the end of what was read that the stop begins with
        self._shorter = _borders(text)

    def forget(self) -> None:
        """Begin anew: what was read so far is no part of a stop string."""
        self.num_matched = 0

    def find_end(self, new: str) -> int | None:
        """Where in `new` the stop string ends first; None if it does not end there."""
        if self.num_matched == 0 and self.text[0] not in new:
            return None
        matched = self.num_matched
        for at, character in enumerate(new):
            while matched and self.text[matched] != character:
                matched = self._shorter[matched]
            matched += self.text[matched] == character
            if matched == len(self.text):
                self.num_matched = 0
                return at + 1
        self.num_matched = matched
        return None


def _borders(text: str) -> list[int]:
    """For each beginning of `text`, by length: its longest shorter beginning that also ends it."""
    borders = [0, 0]
    length = 0
    for character in text[1:]:
        while length and text[length] != character:
            length = borders[length]
        length += text[length] == character
        borders.append(length)
    return borders
