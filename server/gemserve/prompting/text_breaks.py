"""Finds where paragraphs, sentences and lines begin: a filter should keep whole ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from gemserve.contract.prompt_parts import TextBreaks
from gemserve.prompting.enclosing_lines import find_enclosing
from gemserve.prompting.encoding import IntArray, encode
from gemserve.prompting.text_lines import Bools, Lines, find_lines

# What a line announces with a colon, such as a list, stays with it.
_PARAGRAPH = re.compile(r"(?<![:：\n])\n(?:[^\S\n]*\n)+")
# A space belongs to the token behind it, so a sentence begins with the space in front of it.
_SENTENCE = re.compile(
    r"[.!?…][\"'”’»)\]]*(?=\s+[^a-z\s])|[。！？]|\n(?=[^\S\n]*(?:[-*•#>]|\d+[.)]))"
)
_LETTER = re.compile(r"[^\W\d_]")
_PIECE = 1 << 15  # characters; a pattern holds the interpreter lock until it finds something
_AT_ONCE = 1 << 16  # tokens


def find_breaks(texts: Sequence[tuple[int, str]], starts: IntArray | Sequence[int]) -> TextBreaks:
    """The tokens that begin a paragraph, a sentence or list item, and a line.

    `texts`: the messages, or a text as a whole, each with the offset of its first character; each
    begins a paragraph. `starts`: the character at which each token begins, ascending.
    """
    starts = np.asarray(starts, dtype=np.int64)
    edges = [c for at, text in texts for c in (at, at + len(text))]
    lines = find_lines(texts)
    is_joint = _with_line_end(starts, lines)
    at, behind = (_with_indentation(starts, is_joint, c) for c in (lines.starts, lines.stops))
    return TextBreaks(
        paragraphs=_tokens(starts, np.append(_ends(_PARAGRAPH, texts), edges).astype(np.int64)),
        sentences=_tokens(starts, _ends(_SENTENCE, texts)),
        lines=_tokens(starts, _line_ends(texts)),
        with_line_end=np.flatnonzero(is_joint).astype(np.uint32),
        enclosing=find_enclosing(lines, at, behind),
    )


def text_of_ids(tokenizer: Any, ids: Sequence[int]) -> tuple[str, IntArray]:
    """The texts of tokens in a row, and the character at which each begins.

    Both are as if of an empty text where an id is no token.
    """
    distinct = sorted(set(ids))
    backend = tokenizer.backend_tokenizer
    # where a text begins, some tokenizers leave out a blank
    before: list[int] = encode(tokenizer, "a", add_special_tokens=False).ids
    alone = [before, list(ids[:1])]
    try:
        decoded: list[str] = backend.decode_batch(
            [*alone, *([*before, i] for i in distinct)], skip_special_tokens=False
        )
    except OverflowError:  # an id that no tokenizer can have
        return "", np.zeros(0, dtype=np.int64)
    text_before, first, *decoded = decoded
    text_of = {i: text.removeprefix(text_before) for i, text in zip(distinct, decoded, strict=True)}
    texts: list[str] = []
    lengths: list[int] = []
    for start in range(0, len(ids), _AT_ONCE):
        part = [text_of[i] for i in ids[start : start + _AT_ONCE]]
        if start == 0:
            part[0] = first
        texts.append("".join(part))
        lengths += map(len, part)
    counts = np.array(lengths, dtype=np.int64)
    starts: IntArray = counts.cumsum() - counts
    return "".join(texts), starts


def _tokens(starts: IntArray, characters: IntArray) -> tuple[int, ...]:
    """The first tokens that begin at these characters or behind them, each once."""
    found = np.sort(starts.searchsorted(characters))  # `unique` takes seconds for a million
    is_new = np.diff(found, prepend=-1) > 0
    return tuple(found[is_new & (found < len(starts))].tolist())


def _with_line_end(starts: IntArray, lines: Lines) -> Bools:
    """Which tokens are a line's indentation, or its beginning, and the line end before: [tokens].

    They are nothing but blanks, though maybe of several lines.
    """
    is_joint = np.zeros(len(starts), dtype=np.bool_)
    if len(starts) == 0:
        return is_joint
    # a text's first line has no other in front of it
    is_inner = np.diff(lines.texts, prepend=-1) == 0
    number = np.flatnonzero(is_inner & ~lines.is_blank & (lines.firsts > lines.starts))
    at = starts.searchsorted(lines.starts[number])
    stops = starts[np.minimum(at, len(starts) - 1)]
    is_within = (stops > lines.starts[number]) & (stops <= lines.firsts[number]) & (at > 0)
    is_within &= starts[at - 1] >= lines.lasts[number - 1]
    is_joint[at[is_within] - 1] = True
    return is_joint


def _with_indentation(starts: IntArray, is_joint: Bools, characters: IntArray) -> IntArray:
    """The first tokens that begin at these characters or behind them: [characters].

    Where a character is within a token of `_with_line_end`, it is this token.
    """
    found = starts.searchsorted(characters)
    if is_joint.any():
        begins = starts[np.minimum(found, len(starts) - 1)]
        found -= (found > 0) & (begins > characters) & is_joint[found - 1]
    return found


def _ends(pattern: re.Pattern[str], texts: Sequence[tuple[int, str]]) -> IntArray:
    """The ends of all matches in the texts."""
    found = [
        at + np.array([m.end() for m in pattern.finditer(text, start, stop)], dtype=np.int64)
        for at, text in texts
        for start, stop in _pieces(text)
    ]
    return np.concatenate([np.zeros(0, dtype=np.int64), *found])


def _line_ends(texts: Sequence[tuple[int, str]]) -> IntArray:
    """The places behind all line ends in the texts, which may be nothing else."""
    found = [
        at + start + 1 + np.flatnonzero(_codes(text[start:stop]) == ord("\n"))
        for at, text in texts
        for start, stop in _pieces(text)
    ]
    return np.concatenate([np.zeros(0, dtype=np.int64), *found])


def _codes(text: str) -> npt.NDArray[np.uint32]:
    return np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")


def _pieces(text: str) -> Iterator[tuple[int, int]]:
    """Cuts a text behind letters, beyond which no pattern looks.

    A text without letters is cut anywhere, where a break may be missed or be one too many.
    """
    start = 0
    while len(text) - start > 2 * _PIECE:
        letter = _LETTER.search(text, start + _PIECE, start + 2 * _PIECE)
        stop = start + 2 * _PIECE if letter is None else letter.end()
        yield start, stop
        start = stop
    yield start, len(text)
