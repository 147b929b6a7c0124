"""Compares a question with the keys of all segments of libraries, exactly.

The scale is that of `filtering.segment_scores`: all logits of a row and head go under one softmax,
with one sink. A segment scores by its best token: the largest share of any row's attention.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from gemserve.contract.filter_plan import QueriesRead
from gemserve_library.keys_file import Records

Floats = npt.NDArray[np.float32]

_AT_ONCE = 1 << 14  # records


@dataclass(slots=True, eq=False)
class _RowSums:
    """What is known of segments so far: [segments, rows] each, where the rows of all heads are."""

    best: list[Floats] = field(default_factory=list)
    sums: list[Floats] = field(default_factory=list)


def attention_to_segments(
    queries: QueriesRead,
    key_head_of: Sequence[int],
    parts: Sequence[tuple[Records, npt.NDArray[np.int64], npt.NDArray[np.int64]]],
) -> list[Floats]:
    """The score of each segment, 0 to 1. `key_head_of`: which key head each head reads.

    `parts`: of each library its records, and the first one and the number of those of each segment,
    in the order of their places. Segments of 0 records score 0. Those that several files have, in
    the same records, count once. Returns one array for each library.
    """
    sums, numbers = _RowSums(), []
    for records, starts, counts in parts:
        is_there = counts > 0
        distinct, first, number = np.unique(
            starts[is_there], return_index=True, return_inverse=True
        )
        numbers.append(number)
        for block in _blocks(distinct, counts[is_there][first]):
            _add_block(sums, queries, key_head_of, records, *block)
    scores = _scores(sums, queries.sinks.reshape(-1))
    found, at = [], 0
    for (_, _, counts), number in zip(parts, numbers, strict=True):
        of_segments = np.zeros(len(counts), dtype=np.float32)
        of_segments[counts > 0] = scores[at : at + number.max(initial=-1) + 1][number]
        at += number.max(initial=-1) + 1
        found.append(of_segments)
    return found


def _scores(sums: _RowSums, sinks: Floats) -> Floats:
    if not sums.best:
        return np.zeros(0, dtype=np.float32)
    best, sum_of = np.concatenate(sums.best), np.concatenate(sums.sums)
    total = np.logaddexp(np.logaddexp.reduce(sum_of.astype(np.float64), axis=0), sinks)
    return np.exp(best - total).max(axis=1).astype(np.float32)


def _blocks(
    starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]
) -> Iterator[tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]]:
    """Runs of segments near each other: the first record, the segments' edges in it, and its end.

    The edges of a segment are where it begins and ends; what is between two segments is of none.
    """
    first = 0
    for index in range(1, len(starts) + 1):
        is_last = index == len(starts)
        if is_last or starts[index] + counts[index] - starts[first] > _AT_ONCE:
            begin = int(starts[first])
            low = starts[first:index] - begin
            yield begin, low, low + counts[first:index]
            first = index


def _add_block(
    sums: _RowSums,
    queries: QueriesRead,
    key_head_of: Sequence[int],
    records: Records,
    begin: int,
    low: npt.NDArray[np.int64],
    high: npt.NDArray[np.int64],
) -> None:
    part = records[begin : begin + int(high[-1])]
    keys = torch.from_numpy(np.ascontiguousarray(part["keys"]))  # [tokens, key heads, head_dim]
    scales = torch.from_numpy(part["scale"].astype(np.float32))
    # segments follow each other, so that what is between two of them is a part of its own
    edges = np.stack([low, high], axis=1).reshape(-1)
    best, logsums = [], []
    for head, softcap in enumerate(queries.softcaps):
        key_head = key_head_of[head]
        query = torch.from_numpy(queries.queries[head])
        # rows first: sums along the tokens are then along memory
        logits = query @ keys[:, key_head].float().T * scales[:, key_head]  # [rows, tokens]
        if softcap is not None:
            logits = softcap * torch.tanh(logits / softcap)
        highest = logits.amax(1, keepdim=True)
        exps = (logits - highest).exp_().numpy()
        of_segments = logits.numpy()
        sum_of = np.add.reduceat(exps, edges[:-1], axis=1)[:, ::2].T
        with np.errstate(divide="ignore"):  # no token of a segment is near the best of the block
            logsums.append(np.log(sum_of) + highest[:, 0].numpy())
        best.append(np.maximum.reduceat(of_segments, edges[:-1], axis=1)[:, ::2].T)
    sums.best.append(np.concatenate(best, axis=1))
    sums.sums.append(np.concatenate(logsums, axis=1))
