"""Finds the heads that attend to needed tokens, by the recall of any set of heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from gemserve.calibration.search.probes import WORD_KINDS
from gemserve.contract.prompt_parts import Priority
from gemserve.filtering.passages import number_passages, rank_passages
from gemserve.filtering.selector import Evidence, LayerEvidence
from gemserve.filtering.sieve import Sieve
from gemserve.ranges import as_ranges

Head = tuple[int, int]  # (layer, head)
# Recall is averaged over choices that hold these shares of a document. Half of a probe's sentences
# are facts or decoys, so several places there have to do with any question.
SHARES = (1 / 8, 1 / 16)
# A passage is found if so many of its tokens are kept: what a question looks at in it, with its
# neighbours. More of a long one need not be.
_FOUND_TOKENS = 16
MOST_HEADS = 4
_POOL = 16  # only so many of the best heads are combined
_GAIN = 0.005  # least gain of recall for which a head is added
_PASSAGE = Sieve().longest  # tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """How much all heads attended to each token of one probe.

    `scores`: by way of choosing rows, [layers, heads, tokens], float16. A score is the largest
    attention of a row of the question (False), or of the question or the prompt's end (True).
    `layers`: the index of each. `document`: the positions that a choice is made from, ascending.
    `gold`: which of these an answer needs; empty if there is no answer. `passages`: the number of
    each one's passage.
    """

    kind: str
    layers: Sequence[int]
    scores: dict[bool, torch.Tensor]
    document: torch.Tensor
    gold: torch.Tensor
    passages: torch.Tensor

    def of(self, heads: Sequence[Head], ends_with: bool) -> torch.Tensor:
        """The largest score of any of `heads`, for the document's tokens: [tokens], float32."""
        scores = self.scores[ends_with]
        rows = [scores[self.layers.index(layer), head] for layer, head in heads]
        return torch.stack(rows).float().amax(dim=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeObservations:
    """What all heads attended to in one probe: for each of its facts, and for the other two."""

    facts: tuple[Observation, ...]
    absent: Observation
    diffuse: Observation


def observation_of(
    evidence: Evidence,
    kind: str,
    gold: Sequence[tuple[int, int]],
    question_rows: int,
    pause: Callable[[], None] = lambda: None,
) -> Observation:
    """The observation of a prompt whose first `question_rows` rows are the question's.

    `pause` is called behind each layer.
    """
    layers = evidence.layers
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
    of_layers = []
    for layer in layers.values():
        of_layers.append(_scores_of_heads(layer, evidence, question_rows))
        pause()
    return Observation(
        kind=kind,
        layers=list(layers),
        scores={
            ends_with: torch.stack([scores[ends_with] for scores in of_layers])[
                ..., document
            ].half()
            for ends_with in (False, True)
        },
        document=document,
        gold=is_gold[document].nonzero().flatten(),
        passages=torch.from_numpy(number_passages(evidence.num_tokens, evidence.breaks, _PASSAGE))[
            document
        ],
    )


def _scores_of_heads(
    layer: LayerEvidence, evidence: Evidence, question_rows: int
) -> dict[bool, torch.Tensor]:
    """The scores of every head of a layer by the question's rows, and by all: [heads, tokens].

    They are those of `largest_attention`, of all heads at once, on the host.
    """
    rows = torch.tensor(evidence.rows)
    queries = layer.queries.float().cpu()  # [heads, rows, head_dim]
    largest = []
    for count in (question_rows, len(rows)):
        keys = layer.keys_near(layer.keys, evidence.rows[:count], Sieve().ceiling)
        keys = keys[:, : evidence.num_tokens].float().cpu()
        keys = keys.repeat_interleave(len(queries) // len(keys), dim=0)
        logits = queries[:, :count] @ keys.mT * layer.scale  # [heads, rows, tokens]
        if layer.softcap is not None:
            logits = layer.softcap * (logits / layer.softcap).tanh()
        is_later = torch.arange(keys.shape[1]) > rows[:count, None]
        largest.append(logits.masked_fill_(is_later, -torch.inf).softmax(dim=-1).amax(dim=1))
    return {False: largest[0], True: largest[1]}


def recalls(scores: torch.Tensor, observation: Observation, share: float) -> torch.Tensor:
    """How much of the gold is among the best `share` of the document: [...], 0 to 1.

    The mean over its passages: of each as many tokens as it has, but at most `_FOUND_TOKENS`.
    `scores`: [..., tokens], of the document's tokens. They are ranked as sieve ranks them.
    """
    tokens = scores.shape[-1]
    flat = scores.reshape(1, -1, tokens).float()
    reach = Sieve().reach
    ranks = F.max_pool1d(flat, 2 * reach + 1, stride=1, padding=reach)[0] + 1e-6 * flat[0]
    kept = max(1, round(share * tokens))
    # exactly so many, because most tokens of a head with little attention tie at zero
    is_kept = torch.zeros_like(ranks).scatter_(-1, ranks.topk(kept, dim=-1).indices, 1.0)
    passages = as_ranges(observation.gold.tolist())
    found = torch.zeros(len(ranks))
    for start, stop in passages:
        wanted = min(stop - start, _FOUND_TOKENS)
        found += (is_kept[:, start:stop].sum(dim=-1) / wanted).clamp_max(1)
    return (found / max(1, len(passages))).reshape(scores.shape[:-1])


def recall_of(heads: Sequence[Head], observation: Observation, ends_with: bool) -> float:
    """Recall of a set of heads on one probe, averaged over `SHARES`."""
    scores = observation.of(heads, ends_with)
    return sum(float(recalls(scores, observation, share)) for share in SHARES) / len(SHARES)


def coverage(heads: Sequence[Head], observation: Observation, ends_with: bool) -> float:
    """The coverage that sieve would report with these heads."""
    scores = observation.of(heads, ends_with)
    return Sieve().coverage(scores)


def segment_coverage(heads: Sequence[Head], observation: Observation, ends_with: bool) -> float:
    """The coverage that sieve would report if the probe were one of several segments."""
    scores = observation.of(heads, ends_with)
    return round(min(1.0, float(rank_passages(scores, observation.passages).max())), 4)


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


def balanced(kinds: Sequence[str]) -> torch.Tensor:
    """How much each probe counts, by its kind: [probes], the sum is 1.

    Questions that repeat the words of their fact and those that do not count half each, and the
    kinds of either sort count alike.
    """
    sorts = [kind in WORD_KINDS for kind in kinds]
    shares = []
    for kind, is_by_words in zip(kinds, sorts, strict=True):
        of_sort = {k for k, by_words in zip(kinds, sorts, strict=True) if by_words == is_by_words}
        shares.append(1 / (len(set(sorts)) * len(of_sort) * kinds.count(kind)))
    return torch.tensor(shares)


def best_heads(
    probes: Sequence[Observation], singles: torch.Tensor, layer: int, ends_with: bool
) -> tuple[tuple[Head, ...], torch.Tensor]:
    """The set of at most `MOST_HEADS` heads up to `layer` with the best recall, on balance.

    And that recall for each probe: [probes]. The set starts with the best single head and grows one
    head at a time. `singles`: see `single_recalls`.
    """
    layers, weights = probes[0].layers, balanced([probe.kind for probe in probes])
    mean = torch.einsum("p,plh->lh", weights, singles)
    pool = sorted(
        ((index, head) for index in layers for head in range(mean.shape[1]) if index <= layer),
        key=lambda pair: -float(mean[layers.index(pair[0]), pair[1]]),
    )[:_POOL]
    places = [layers.index(index) for index, _ in pool], [head for _, head in pool]
    pool_scores = [observation.scores[ends_with][places] for observation in probes]
    chosen: list[int] = [0]
    found = singles[:, places[0][0], places[1][0]]
    while len(chosen) < min(MOST_HEADS, len(pool)):
        joined = torch.stack(
            [
                _joined(scores, observation, chosen)
                for scores, observation in zip(pool_scores, probes, strict=True)
            ]
        )
        tried = weights @ joined
        tried[chosen] = -1
        head = int(tried.argmax())
        if float(tried[head]) < float(weights @ found) + _GAIN:
            break
        chosen, found = [*chosen, head], joined[:, head]
    return tuple(sorted(pool[i] for i in chosen)), found


def _joined(scores: torch.Tensor, observation: Observation, chosen: Sequence[int]) -> torch.Tensor:
    """Recall of `chosen` with each head of a pool, averaged over `SHARES`: [pool].

    `scores`: those of the pool's heads, [pool, tokens].
    """
    together = torch.maximum(scores, scores[list(chosen)].amax(dim=0))
    return torch.stack([recalls(together, observation, share) for share in SHARES]).mean(0)
