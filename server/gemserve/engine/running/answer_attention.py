"""Finds which kept passages the tokens of an answer attended to (`return_attention`).

Nothing is recorded while tokens are decoded, so other requests decode as always. Every few tokens
the lower layers run once more over the newest ones, from the keys and values that decoding has
left, and store nothing. This gives the queries of the filter's heads.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from gemserve.contract.prompt_parts import TextBreaks
from gemserve.contract.requests import Request
from gemserve.contract.scores import MOST_ANSWER_TOKENS, MOST_LEANED, AnswerAttention
from gemserve.engine.sequence.step_plan import Kept
from gemserve.filtering.passages import number_passages
from gemserve.model.adapter import Adapter
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.kv import KVSpan

EVERY = 16  # tokens from one look to the next: a look costs less than a decode step then
PASSAGE_TOKENS = 64  # most tokens of a passage
_LEAST_WEIGHT = 0.001


class AnswerWatch:
    """Looks at one request's answer. `model`: with the request's adapter.

    `kept`: what the answer is generated from; None: all of the prompt.
    """

    def __init__(
        self, request: Request, kept: Kept | None, model: CausalModel, adapter: Adapter
    ) -> None:
        plan = request.plan
        assert plan is not None
        assert plan.answer_layer is not None
        self._model, self._adapter = model, adapter
        everything = range(len(request.prompt_ids))
        if kept is None:
            kept = Kept(positions=everything, ids=request.prompt_ids)
        positions = kept.positions
        self._num_kept = len(kept.ids)
        self._last = kept.ids[-1]  # its row is where the first token is from
        # no passage has the tokens that separate passages
        of_prompt = np.delete(np.arange(self._num_kept), list(kept.added))
        self._of_prompt = torch.from_numpy(of_prompt).to(model.device)
        self._length = self._num_kept + request.sampling.max_tokens
        every = [(plan.answer_layer, head) for head in range(model.shape.num_heads)]
        self._heads = plan.answer_heads or tuple(every)
        self._passages, slots = _passages_of(request, positions)
        self._slots = torch.from_numpy(slots).to(model.device)
        self._found: list[tuple[tuple[int, float], ...]] = []

    def look(self, count: int, drawn: Sequence[int], kv: KVSpan, *, least: int = 1) -> None:
        """Look at the first `count` tokens of an answer, if at least `least` of them are new.

        A token is drawn from the row before it, so the first one from the prompt's last row. So
        `drawn` has all tokens but perhaps the last one. `kv` has the keys and values of all rows
        that they were drawn from.
        """
        done, stop = len(self._found), min(count, MOST_ANSWER_TOKENS)
        while stop - done >= max(1, least):
            some = min(stop - done, EVERY)
            first = self._num_kept - 1 + done
            before = [self._last, *drawn]
            layers = sorted({layer for layer, _ in self._heads})
            queries = self._model.queries_of(
                before[done : done + some],
                start=first,
                kv=kv,
                layers=layers,
                length=self._length,
                adapter=self._adapter,
            )
            weights = torch.zeros(some, len(self._passages), device=self._model.device)
            for layer, head in self._heads:
                keys = kv.keys(layer, first + some)
                attention = attention_of(
                    queries.of(layer)[head],
                    keys[head * keys.shape[0] // queries.queries.shape[1]],
                    scale=queries.scales[layer],
                    softcap=queries.softcaps[layer],
                )
                attention[:, 0] = 0  # an attention sink
                weights.index_add_(1, self._slots, attention[:, self._of_prompt])
            self._found += _strongest(weights / len(self._heads))
            done += some

    def report(self, offsets: Sequence[int]) -> AnswerAttention:
        """What was found. `offsets`: where each token of the answer begins in its text."""
        named = sorted({passage for token in self._found for passage, _ in token})
        place = {passage: index for index, passage in enumerate(named)}
        return AnswerAttention(
            heads=self._heads,
            passages=tuple(self._passages[passage] for passage in named),
            offsets=tuple(offsets[: len(self._found)]),
            tokens=tuple(
                tuple((place[passage], weight) for passage, weight in token)
                for token in self._found
            ),
        )


def attention_of(
    query: torch.Tensor, keys: torch.Tensor, *, scale: float, softcap: float | None
) -> torch.Tensor:
    """One head's attention [rows, tokens], float32; the rows are the last ones of the tokens."""
    logits = query.float() @ keys.float().T * scale
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    rows, tokens = logits.shape
    later = torch.ones(rows, tokens, dtype=torch.bool, device=logits.device)
    return logits.masked_fill(later.triu(tokens - rows + 1), -torch.inf).softmax(dim=-1)


def _strongest(weights: torch.Tensor) -> list[tuple[tuple[int, float], ...]]:
    """Of each row [rows, passages] the passages with the largest weights, best first."""
    best = weights.topk(min(MOST_LEANED, weights.shape[1]), dim=1)
    rows = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [
        tuple(
            (index, round(weight, 4))
            for index, weight in zip(indices, values, strict=True)
            if weight >= _LEAST_WEIGHT
        )
        for indices, values in rows
    ]


def _passages_of(
    request: Request, kept: Sequence[int]
) -> tuple[list[tuple[int, int]], npt.NDArray[np.int64]]:
    """The prompt's passages that are kept at least in part, and the one of each kept token."""
    starts = _starts(len(request.prompt_ids), request.breaks)
    of_slot = np.searchsorted(starts, np.asarray(kept, dtype=np.int64), side="right") - 1
    numbers, slots = np.unique(of_slot, return_inverse=True)
    stops = np.append(starts[1:], len(request.prompt_ids))
    passages = zip(starts[numbers].tolist(), stops[numbers].tolist(), strict=True)
    return list(passages), slots.astype(np.int64)


def _starts(num_tokens: int, breaks: TextBreaks) -> npt.NDArray[np.int64]:
    """Where passages begin; text without breaks is cut into pieces of the same length."""
    numbers = number_passages(num_tokens, breaks, PASSAGE_TOKENS)
    starts = np.flatnonzero(np.diff(numbers, prepend=-1))
    stops = np.append(starts[1:], num_tokens)
    pieces = [
        np.arange(start, stop, PASSAGE_TOKENS) for start, stop in zip(starts, stops, strict=True)
    ]
    return np.concatenate(pieces)
