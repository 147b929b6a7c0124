"""Finds the heads that attend to needed tokens, by the recall of any set of heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gemserve.filtering.selector import Evidence
from gemserve.filtering.sieve import Sieve
from gemserve.types import Priority

Head = tuple[int, int]  # (layer, head)
# Recall is averaged over choices that hold these shares of a document.
SHARES = (1 / 16, 1 / 32)
MOST_HEADS = 4
_POOL = 16  # only so many of the best heads are combined
_GAIN = 0.005  # least gain of recall for which a head is added


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """How much all heads attended to each token of one probe.

    `scores`: by way of choosing rows, [layers, heads, tokens], float16. A score is the largest
    attention of a row of the question (False), or of the question or the prompt's end (True).
    `layers`: the index of each. `document`: the positions that a choice is made from, ascending.
    `gold`: the positions that an answer needs; empty if there is no answer.
    """

    kind: str
    layers: Sequence[int]
    scores: dict[bool, torch.Tensor]
    document: torch.Tensor
    gold: torch.Tensor

    def of(self, heads: Sequence[Head], ends_with: bool) -> torch.Tensor:
        """The largest score of any of `heads`, for the document's tokens: [tokens], float32."""
        scores = self.scores[ends_with]
        rows = [scores[self.layers.index(layer), head] for layer, head in heads]
        return torch.stack(rows).float().amax(dim=0)


# One probe's three questions: about the fact, about an absent fact, and about all of the text.
ProbeObservations = tuple[Observation, Observation, Observation]


def observation_of(
    evidence: Evidence, kind: str, gold: Sequence[tuple[int, int]], question_rows: int
) -> Observation:
    """The observation of a prompt whose first `question_rows` rows are the question's."""
    layers = list(evidence.layers)
    is_free = torch.ones(evidence.num_tokens, dtype=torch.bool)
    is_free[0] = False
    for span in evidence.protected:
        # the other protected positions are a part of the document
        if span.priority <= Priority.FRAME:
            is_free[span.start : span.stop] = False
    is_gold = torch.zeros(evidence.num_tokens, dtype=torch.bool)
    for start, stop in gold:
        is_gold[start:stop] = True
    document = is_free.nonzero().flatten()
    scores = {
        ends_with: torch.stack([_heads(evidence, i, question_rows, ends_with) for i in layers])
        for ends_with in (False, True)
    }
    return Observation(
        kind=kind,
        layers=layers,
        scores={key: value[..., document].half() for key, value in scores.items()},
        document=document,
        gold=is_gold[document].nonzero().flatten(),
    )


def _heads(evidence: Evidence, index: int, question_rows: int, ends_with: bool) -> torch.Tensor:
    """The scores of every head of a layer: [heads, tokens], on the host."""
    layer, backend = evidence.layers[index], evidence.backend
    count = len(evidence.rows) if ends_with else question_rows
    rows = torch.tensor(evidence.rows[:count], device=layer.keys.device)
    keys = layer.keys_near(layer.keys, evidence.rows[:count], Sieve().ceiling)
    num_heads, kv_heads = layer.queries.shape[0], layer.keys.shape[0]
    return torch.stack(
        [
            backend.largest_attention(
                layer.queries[head, None, :count],
                keys[head * kv_heads // num_heads, None],
                rows,
                scale=layer.scale,
                softcap=layer.softcap,
            )
            for head in range(num_heads)
        ]
    ).cpu()


def recalls(scores: torch.Tensor, observation: Observation, share: float) -> torch.Tensor:
    """The share of the gold tokens that are among the best `share` of the document: [...].

    `scores`: [..., tokens], of the document's tokens. They are ranked as sieve ranks them.
    """
    tokens = scores.shape[-1]
    flat = scores.reshape(1, -1, tokens).float()
    reach = Sieve().reach
    ranks = F.max_pool1d(flat, 2 * reach + 1, stride=1, padding=reach)[0] + 1e-6 * flat[0]
    kept = max(1, round(share * tokens))
    # exactly so many, because most tokens of a head with little attention tie at zero
    is_kept = torch.zeros_like(ranks).scatter_(-1, ranks.topk(kept, dim=-1).indices, 1.0)
    recall = is_kept[:, observation.gold].mean(dim=-1)
    return recall.reshape(scores.shape[:-1])


def recall_of(heads: Sequence[Head], observation: Observation, ends_with: bool) -> float:
    """Recall of a set of heads on one probe, averaged over `SHARES`."""
    scores = observation.of(heads, ends_with)
    return sum(float(recalls(scores, observation, share)) for share in SHARES) / len(SHARES)


def coverage(heads: Sequence[Head], observation: Observation, ends_with: bool) -> float:
    """The coverage that sieve would report with these heads."""
    scores = observation.of(heads, ends_with)
    return Sieve().coverage(scores)


def single_recalls(probes: Sequence[Observation], ends_with: bool) -> torch.Tensor:
    """Recall of every head alone, averaged over `SHARES`: [probes, layers, heads]."""
    return torch.stack(
        [
            torch.stack(
                [recalls(observation.scores[ends_with], observation, share) for share in SHARES]
            ).mean(0)
            for observation in probes
        ]
    )


def best_heads(
    probes: Sequence[Observation], singles: torch.Tensor, layer: int, ends_with: bool
) -> tuple[tuple[Head, ...], float]:
    """The set of at most `MOST_HEADS` heads up to `layer` with the best recall, and that recall.

    It starts with the best single head and grows one head at a time. `singles`: see
    `single_recalls`.
    """
    layers = probes[0].layers
    mean = singles.mean(dim=0)
    pool = sorted(
        ((index, head) for index in layers for head in range(mean.shape[1]) if index <= layer),
        key=lambda pair: -float(mean[layers.index(pair[0]), pair[1]]),
    )[:_POOL]
    chosen: list[int] = [0]
    best = float(mean[layers.index(pool[0][0]), pool[0][1]])
    pool_scores = [
        observation.scores[ends_with][[layers.index(i) for i, _ in pool], [h for _, h in pool]]
        for observation in probes
    ]
    while len(chosen) < min(MOST_HEADS, len(pool)):
        joined = torch.stack(
            [
                _joined(scores, observation, chosen)
                for scores, observation in zip(pool_scores, probes, strict=True)
            ]
        )
        tried = joined.mean(dim=0)
        tried[chosen] = -1
        head = int(tried.argmax())
        if float(tried[head]) < best + _GAIN:
            break
        chosen, best = [*chosen, head], float(tried[head])
    return tuple(sorted(pool[i] for i in chosen)), best


def _joined(scores: torch.Tensor, observation: Observation, chosen: Sequence[int]) -> torch.Tensor:
    """Recall of `chosen` with each head of a pool, averaged over `SHARES`: [pool].

    `scores`: those of the pool's heads, [pool, tokens].
    """
    together = torch.maximum(scores, scores[list(chosen)].amax(dim=0))
    return torch.stack([recalls(together, observation, share) for share in SHARES]).mean(0)
