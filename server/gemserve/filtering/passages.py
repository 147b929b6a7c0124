"""Cuts a prompt into passages: paragraphs, or parts of long ones made of sentences or lines.

A passage is kept or dropped as a whole. Single tokens lose the end of a number, and half a sentence
misleads a small model more than none.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import torch

from gemserve.contract.prompt_parts import TextBreaks

SHORTEST = 24  # a paragraph of fewer tokens, such as a heading, joins the next one
_NUM_PEAKS = 3  # a passage ranks by the mean of this many highest scores


def number_passages(num_tokens: int, breaks: TextBreaks, limit: int) -> npt.NDArray[np.int64]:
    """The number of each token's passage, from 1: [num_tokens].

    A passage has at most `limit` tokens. Tokens have the number 0 if they are in a stretch of more
    than `limit` tokens without any break, which is in no passage.
    """
    numbers = np.zeros(num_tokens, dtype=np.int64)
    paragraphs = _join_short(_pieces(0, num_tokens, breaks.paragraphs), limit)
    levels = (breaks.sentences, breaks.lines)
    passages = (part for start, stop in paragraphs for part in _split(start, stop, levels, limit))
    for number, (start, stop) in enumerate(passages, start=1):
        numbers[start:stop] = number
    return numbers


def rank_passages(scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """The mean of the three highest scores in each token's passage: [tokens].

    `numbers` comes from `number_passages`. The result means nothing for tokens in no passage.
    """
    if len(numbers) == 0:
        return scores
    # without a sort of all tokens, which takes the engine's thread 0.3 s for a million of them
    is_first = torch.ones_like(numbers, dtype=torch.bool)
    is_first[1:] = numbers[1:] != numbers[:-1]
    starts = is_first.nonzero().flatten()
    sizes = torch.diff(starts, append=starts.new_tensor([len(numbers)]))
    means = torch.zeros(len(starts), dtype=scores.dtype, device=scores.device)
    width = _NUM_PEAKS
    while width // 4 < int(sizes.max()):  # passages of about the same size together
        alike = ((sizes <= width) & (sizes > width // 4)).nonzero().flatten()
        places = torch.arange(width, device=scores.device)
        at = (starts[alike, None] + places).clamp_max(len(scores) - 1)
        values = scores[at].masked_fill(places >= sizes[alike, None], -torch.inf)
        peaks = values.topk(_NUM_PEAKS, dim=1).values
        total = peaks.masked_fill(peaks == -torch.inf, 0).sum(dim=1)
        means[alike] = total / sizes[alike].clamp(1, _NUM_PEAKS)
        width *= 4
    return means.repeat_interleave(sizes)


def _pieces(start: int, stop: int, breaks: Sequence[int]) -> list[tuple[int, int]]:
    """start..stop−1 cut at the breaks within it."""
    inner = breaks[bisect_right(breaks, start) : bisect_left(breaks, stop)]
    edges = [start, *inner, stop]
    return list(pairwise(edges))


def _join_short(pieces: Sequence[tuple[int, int]], limit: int) -> list[tuple[int, int]]:
    """Join short paragraphs, such as headings, with the next one."""
    joined: list[tuple[int, int]] = []
    for start, stop in pieces:
        first, last = joined[-1] if joined else (start, start + SHORTEST)
        if last - first < SHORTEST and stop - first <= limit:
            joined[-1] = (first, stop)
        else:
            joined.append((start, stop))
    return joined


def _split(
    start: int, stop: int, levels: Sequence[Sequence[int]], limit: int
) -> Iterator[tuple[int, int]]:
    """Cut start..stop−1 into passages of as many sentences as fit.

    A sentence that does not fit is cut into passages of as many lines as fit.
    """
    if stop - start <= limit:
        yield start, stop
    elif levels:
        begin = end = start
        for _, piece_stop in _pieces(start, stop, levels[0]):
            if piece_stop - begin > limit and end > begin:
                yield from _split(begin, end, levels[1:], limit)
                begin = end
            end = piece_stop
        yield from _split(begin, end, levels[1:], limit)
