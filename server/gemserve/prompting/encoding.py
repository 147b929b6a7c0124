"""Text to token ids and back, without holding the interpreter lock for long.

The tokenizer's library reads a text's offsets, and frees them, while it holds the lock: 0.3 s for a
million tokens. So a long text is encoded in pieces that overlap. Between two of them the work can
be stopped, and it ends as soon as there are more tokens than are wanted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from gemserve.errors import PromptTooLong, RequestError
from gemserve.prompting.stopping import check_stopped

IntArray = npt.NDArray[np.int64]

_PIECE = 1 << 15  # characters; those of code are 20,000 tokens
_OVERLAP = 1024  # characters on either side of the place where two pieces are joined
_AGREED = 512  # characters on either side of it where both must have the same tokens
_FEWEST_AGREED = 16  # tokens
# UTF-8 bytes of a piece. A call for as many takes 0.2 s and 200 MB, and cannot be interrupted.
_MOST_PIECE_BYTES = 12 * _PIECE


@dataclass(frozen=True, slots=True)
class TokenLimit:
    """How many tokens a text may have; `field` is the request's field that has the text.

    `leaves_one`: the model's context has one token more, for the answer.
    """

    most: int
    field: str
    is_context: bool = True  # else it bounds what is only tokenized
    leaves_one: bool = False

    def check(self, num_tokens: int, *, is_least: bool) -> None:
        """Raise `RequestError` if these are too many. `is_least`: there may be more of them."""
        if num_tokens <= self.most:
            return
        if self.is_context:
            raise PromptTooLong(
                tokens=num_tokens,
                limit=self.most,
                param=self.field,
                is_least=is_least,
                leaves_one=self.leaves_one,
            )
        least = "at least " if is_least else ""
        raise RequestError(
            f"{self.field}: has {least}{num_tokens} tokens, the limit of what is tokenized is "
            f"{self.most}",
            param=self.field,
            code="body_too_large",
        )


@dataclass(frozen=True)
class TokenOffsets:
    """Stands in for a `tokenizers.Encoding`.

    `starts`, `ends`: the half-open range of characters of each token, both [tokens].
    """

    ids: list[int]
    starts: IntArray
    ends: IntArray

    def __len__(self) -> int:
        return len(self.ids)

    def token_to_chars(self, index: int) -> tuple[int, int]:
        return int(self.starts[index]), int(self.ends[index])

    @cached_property
    def offsets(self) -> list[tuple[int, int]]:
        return list(zip(self.starts.tolist(), self.ends.tolist(), strict=True))


def encode(
    tokenizer: Any, text: str, *, add_special_tokens: bool, limit: TokenLimit | None = None
) -> Any:
    """The text's `tokenizers.Encoding`; `TokenOffsets` for a long text.

    Raises `PromptTooLong` as soon as a long text has more tokens than `limit` says, and
    `RequestError` for one that cannot be cut into pieces.
    """
    check_stopped()
    backend = tokenizer.backend_tokenizer
    if len(text) > 4 * _PIECE:
        beside = _special_tokens(backend) if add_special_tokens else ([], [])
        if beside is not None:
            return _encode_long(backend, text, *beside, limit)
    return _encode(backend, text, add_special_tokens=add_special_tokens)


def token_edges(encoding: Any) -> tuple[IntArray, IntArray]:
    """The first character of each token, and the one behind its last: both [tokens]."""
    if isinstance(encoding, TokenOffsets):
        return encoding.starts, encoding.ends
    edges = np.fromiter(chain.from_iterable(encoding.offsets), np.int64, 2 * len(encoding))
    edges = edges.reshape(-1, 2)
    return np.ascontiguousarray(edges[:, 0]), np.ascontiguousarray(edges[:, 1])


def decode(tokenizer: Any, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
    """The text of these tokens."""
    backend = tokenizer.backend_tokenizer  # a batch of one, as below
    text: str = backend.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
    return text


def _encode(backend: Any, text: str, *, add_special_tokens: bool) -> Any:
    # unlike `encode`, a batch of one releases the interpreter lock while it works
    return backend.encode_batch([text], add_special_tokens=add_special_tokens)[0]


def _special_tokens(backend: Any) -> tuple[list[int], list[int]] | None:
    """What the tokenizer adds in front of a text and behind it; None: it is not clear."""
    plain = _encode(backend, "a", add_special_tokens=False).ids
    added = _encode(backend, "a", add_special_tokens=True).ids
    for start in range(len(added) - len(plain) + 1):
        stop = start + len(plain)
        if plain and added[start:stop] == plain:
            return added[:start], added[stop:]
    return None


def _encode_long(
    backend: Any,
    text: str,
    before: Sequence[int],
    behind: Sequence[int],
    limit: TokenLimit | None,
) -> TokenOffsets:
    """Encode pieces that overlap, and join them where they have the same tokens.

    A tokenizer splits a text from left to right and looks ahead little. So two pieces that have the
    same tokens over a thousand characters have the tokens of the whole text there. Where no such
    place is found, as within a word of many thousand characters, both are encoded as one piece, up
    to `_MOST_PIECE_BYTES`.
    """
    ids = [*before]
    starts = [np.zeros(len(before), dtype=np.int64)]
    ends = [*starts]
    at = 0  # the first character whose token is not in `ids`
    begin, stop = 0, _PIECE
    piece = _Piece.of(backend, text, begin, stop + _OVERLAP)
    while stop < len(text):
        following = stop + _PIECE
        after = _Piece.of(backend, text, stop - _OVERLAP, following + _OVERLAP)
        joint = piece.joint(after, stop)
        if joint is None:  # twice as long, so that the time stays linear
            following = stop + 2 * (stop - begin)
            _check_piece(text[begin:following], begin)
            piece = _Piece.of(backend, text, begin, following + _OVERLAP)
            stop = following
            continue
        low, high = np.searchsorted(piece.starts, [at, joint])
        ids += piece.ids[low:high].tolist()
        starts.append(piece.starts[low:high])
        ends.append(piece.ends[low:high])
        at, begin, stop, piece = joint, stop - _OVERLAP, following, after
        if limit is not None:
            limit.check(len(ids), is_least=True)
    low = int(np.searchsorted(piece.starts, at))
    ids += [*piece.ids[low:].tolist(), *behind]
    edge = np.full(len(behind), len(text), dtype=np.int64)
    return TokenOffsets(
        ids,
        np.concatenate([*starts, piece.starts[low:], edge]),
        np.concatenate([*ends, piece.ends[low:], edge]),
    )


def num_bytes(text: str) -> int:
    """Bytes of the text as UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def _check_piece(text: str, start: int) -> None:
    if num_bytes(text) > _MOST_PIECE_BYTES:
        raise RequestError(
            f"the text from character {start} on cannot be cut for {len(text)} characters, because "
            f"its tokens depend on where it begins; the limit is {_MOST_PIECE_BYTES} bytes. Break "
            "up what repeats there",
            param=None,
            code="text_not_divisible",
        )


@dataclass(frozen=True, slots=True)
class _Piece:
    """The tokens of a part of a text, with their ranges of characters of the whole text."""

    ids: IntArray
    starts: IntArray
    ends: IntArray

    @staticmethod
    def of(backend: Any, text: str, start: int, stop: int) -> _Piece:
        check_stopped()
        encoding = _encode(backend, text[start:stop], add_special_tokens=False)
        starts, ends = token_edges(encoding)
        return _Piece(np.array(encoding.ids, dtype=np.int64), starts + start, ends + start)

    def joint(self, after: _Piece, place: int) -> int | None:
        """The first character of a token near `place`, where both have the same tokens."""
        near = [piece._near(place - _AGREED, place + _AGREED) for piece in (self, after)]
        if near[0].shape != near[1].shape or (near[0] != near[1]).any():
            return None
        starts, ends = near[0][1], near[0][2]
        # a token begins there, and no character has tokens on both sides
        is_edge = (starts[1:] >= place) & (ends[:-1] <= starts[1:])
        if len(starts) < _FEWEST_AGREED or not is_edge.any():
            return None
        return int(starts[1:][is_edge.argmax()])

    def _near(self, low: int, high: int) -> IntArray:
        """Ids, starts and ends of the tokens that begin at characters low..high−1: [3, tokens]."""
        within = slice(*np.searchsorted(self.starts, [low, high]))
        return np.stack([self.ids[within], self.starts[within], self.ends[within]])
