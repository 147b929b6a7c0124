"""Sieve: keeps the passages that the question attends to, and protected tokens."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from gemserve.contract.filter_options import FilterParams, Heads
from gemserve.contract.filter_plan import Budget
from gemserve.contract.prompt_parts import TextBreaks, TokenArray
from gemserve.contract.scores import (
    MOST_HEAD_SCORES,
    MOST_HEADS,
    MOST_PASSAGES,
    HeadScores,
    SelectionInputs,
)
from gemserve.filtering.kept_ranges import KeptRanges
from gemserve.filtering.passages import number_passages, rank_passages
from gemserve.filtering.protected_budget import ReservedPositions, reserve
from gemserve.filtering.score_report import strengths
from gemserve.filtering.segment_scores import MOST_KEPT, SegmentSummary
from gemserve.filtering.selector import (
    Choice,
    Evidence,
    LayerEvidence,
    PromptEvidence,
    ScoreDetails,
    SegmentEvidence,
    Selector,
    TokenRange,
    check_finite,
)
from gemserve.filtering.word_ranks import RankedPassages
from gemserve.ranges import as_ranges

COVERAGE_SHARE = 1 / 16
_AWAKE = 0.1  # a document whose scores add up to less than this has no place that stands out


@dataclass(frozen=True, slots=True, kw_only=True)
class Sieve(Selector):
    """Keeps the passages whose tokens the question attends to most.

    A token's score is the largest attention that any row of the question pays to it in any head: of
    the calibrated heads, or of all heads of the filter layer. Passages rank by these scores and by
    the question's words (see `filtering.word_ranks`), and are kept whole, as many as fit. A passage
    (see `filtering.passages`) has at most `passage_share` of the tokens that may be chosen, within
    `shortest` and `longest`. `reach`: where the text has no breaks, a token ranks by the best score
    among so many neighbours on either side, and those that rank alike are passages. `focus`:
    "auto" keeps no more than the passages with at least this share of the best one's attention.
    `several`: if so many passages answer alike, by attention and by words, a list or a comparison
    is wanted, and "auto" keeps them all.
    `ceiling`: the largest distance between a token and the rows (see `LayerEvidence.keys_near`).
    `end_rows`: rows at the prompt's end that are watched if no question was found, or beside it.
    """

    reads_segments: ClassVar[bool] = True
    keeps_passages: ClassVar[bool] = True

    passage_share: float = 3 / 16
    shortest: int = 32
    longest: int = 96
    reach: int = 8
    focus: float = 0.3
    several: int = 3
    ceiling: int = 4096
    end_rows: int = 16

    def rows(self, num_tokens: int, question: Sequence[TokenRange], ends_with: bool) -> list[int]:
        """The question's tokens.

        Without a question, or with `ends_with`, the prompt's last ones.
        """
        rows = {row for start, stop in question for row in range(start, stop)}
        if ends_with or not rows:
            rows.update(range(max(0, num_tokens - self.end_rows), num_tokens))
        return sorted(rows)

    def layers(self, filter_layer: int, heads: Heads | None) -> list[int]:
        return sorted({layer for layer, _ in heads or ()} | {filter_layer})

    def score(self, evidence: Evidence, params: FilterParams) -> torch.Tensor:
        """Scores: [tokens]. The first token scores 0, because it is an attention sink."""
        return self.score_of_heads(evidence, evidence.heads)

    def score_of_heads(
        self, evidence: Evidence, heads: Sequence[tuple[int, int]] | None
    ) -> torch.Tensor:
        """The scores by these heads; None: by all heads of the filter layer. [tokens]."""
        rows = torch.tensor(evidence.rows, device=evidence.filter_layer.keys.device)
        scores = [
            evidence.backend.largest_attention(
                query,
                layer.keys_near(key, evidence.rows, self.ceiling),
                rows,
                scale=layer.scale,
                softcap=layer.softcap,
            )
            for layer, query, key in _scoring_heads(evidence, heads)
        ]
        largest = torch.stack(scores).amax(dim=0)[: evidence.num_tokens]
        largest[0] = 0 * largest[0]  # a NaN stays a NaN
        return largest

    def summarize_segment(self, evidence: Evidence, num_sinks: int, start: int) -> SegmentSummary:
        num_first = evidence.num_asked or len(evidence.rows)
        found = [
            evidence.backend.attention_beside_sinks(
                query,
                key,
                num_sinks,
                most=MOST_KEPT,
                num_first=num_first,
                scale=layer.scale,
                softcap=layer.softcap,
            )
            for layer, query, key in _scoring_heads(evidence, evidence.heads)
        ]
        return SegmentSummary(
            sinks=torch.cat([head.sinks.flatten() for head in found]),
            keys=torch.cat([head.keys.flatten() for head in found]),
            best=torch.cat([head.best.flatten(0, 1) for head in found]),
            places=torch.cat([head.places.flatten(0, 1) for head in found]) + start,
            shares=torch.stack([head.shares.amax(1) for head in found]).amax(0),
        )

    def choose(self, evidence: PromptEvidence, budget: Budget, params: FilterParams) -> Choice:
        num_tokens = evidence.num_tokens
        raw = check_finite(self._scores(evidence, params))
        scores = raw.clone()
        reserved = reserve(evidence.protected, num_tokens, budget.least_chosen)
        within = budget.high - len(reserved.positions)
        firm = _as_index(reserved.firm, scores.device)
        # a question's words attend to each other, so their neighbours would rank high
        scores[firm] = 0
        is_free = np.ones(num_tokens, dtype=np.bool_)
        is_free[reserved.positions] = False
        room = _room(reserved, evidence, budget)
        limit = self.passage_limit(room, whole=params.keep == "auto")
        numbers = self.passage_numbers(scores, evidence.breaks, limit)
        # a choice without room has found nothing
        coverage = 0.0
        if within and isinstance(evidence, SegmentEvidence):
            coverage = self._segment_coverage(evidence.shares, firm, numbers)
        elif within and isinstance(evidence, Evidence):
            coverage = self.coverage(scores, firm)
            if evidence.num_asked:
                # calls look at less than a question that says what is wanted, and at more than
                # "go on"
                asked = self.score(evidence.of_question, params)
                asked[firm] = 0
                coverage = max(coverage, self.coverage(asked, firm))
        is_trusted = coverage >= evidence.coverage_bound
        is_diffuse = params.fallback and not is_trusted and budget.limit > budget.high
        if is_diffuse and budget.limit == num_tokens:
            positions = torch.arange(num_tokens, device=scores.device)
            return Choice(positions=positions, coverage=coverage, is_diffuse=True, scores=raw)
        passages = self.ranked(scores, numbers, is_free, limit, evidence.words)
        enough, most = None, budget.limit if is_diffuse else budget.high
        if not is_diffuse and within and budget.low < budget.high:
            least = budget.least_chosen - len(reserved.rest)
            enough = max(passages.count_focused(self.focus), least)
            alike = passages.alike()
            if len(alike) >= self.several:
                passages, most = passages.with_first(alike), max(most, budget.several)
                enough = max(enough, passages.num_free[alike].sum())
        kept = KeptRanges(as_ranges(sorted(reserved.positions)), evidence.gaps.num_between)
        best = passages.fill(kept, most, evidence.breaks, enough)
        positions = torch.from_numpy(np.flatnonzero(kept.is_kept(num_tokens))).to(scores.device)
        return Choice(
            positions=positions, coverage=coverage, is_diffuse=is_diffuse, scores=raw, best=best
        )

    def details(
        self, scores: torch.Tensor, evidence: PromptEvidence, budget: Budget, params: FilterParams
    ) -> ScoreDetails:
        """The passages; with "exact", what else is needed to choose again; with "heads", heads."""
        wanted = params.return_scores
        heads: tuple[HeadScores, ...] = ()
        high = 0.0
        if wanted == "heads" and isinstance(evidence, Evidence):
            heads, high = self._head_scores(evidence)
        is_exact = wanted in ("exact", "heads")
        return ScoreDetails(
            passages=self._passages(scores, evidence, budget, params),
            inputs=_inputs(evidence, budget, params) if is_exact else None,
            heads=heads,
            heads_high=high,
        )

    def passage_numbers(self, scores: torch.Tensor, breaks: TextBreaks, limit: int) -> torch.Tensor:
        """See `number_passages`."""
        return torch.from_numpy(number_passages(len(scores), breaks, limit)).to(scores.device)

    def ranked(
        self,
        scores: torch.Tensor,
        numbers: torch.Tensor,
        is_free: npt.NDArray[np.bool_],
        limit: int,
        words: Sequence[TokenArray] = (),
    ) -> RankedPassages:
        """The passages, of at most `limit` tokens, by `scores` and `words`.

        `numbers`: see `passage_numbers`. `is_free`: which tokens may be chosen. It, `scores` and
        `numbers` are [tokens].
        """
        near = self._best_near(scores, limit)
        ranks = torch.where(numbers > 0, rank_passages(scores, numbers), near).cpu().numpy()
        # where the text has no breaks, tokens with the same best neighbour
        alike = torch.where(numbers > 0, 0.0, near).cpu().numpy()
        of_token = numbers.cpu().numpy()
        is_first = np.ones(len(ranks), dtype=np.bool_)
        is_first[1:] = (np.diff(of_token) != 0) | (np.diff(alike) != 0)
        starts = np.flatnonzero(is_first)
        # equal scores, such as zeros, may make thousands of tokens alike
        before = np.arange(len(ranks)) - starts.repeat(np.diff(starts, append=len(ranks)))
        starts = np.flatnonzero(before % limit == 0)
        return RankedPassages.of(starts, ranks[starts].astype(np.float64), is_free, words)

    def passage_limit(self, room: int, *, whole: bool = False) -> int:
        """The most tokens of a passage, if `room` tokens are to be chosen.

        `whole`: they may be a single passage.
        """
        share = room if whole else max(self.passage_share * room, self.shortest)
        return max(1, round(min(share, self.longest, room)))

    def coverage(self, scores: torch.Tensor, outside: torch.Tensor | None = None) -> float:
        """The share of a document's scores that its best sixteenth has, 0 to 1.

        `outside`: positions that are not part of the document. Tokens rank by their neighbours. The
        sixteenth does not depend on how much is kept, so one bound fits every budget and every
        text.
        """
        near, document = self._best_near(scores), scores
        if outside is not None:
            is_document = _without(outside, len(scores))
            near, document = near[is_document], document[is_document]
        count = max(1, round(COVERAGE_SHARE * len(document)))
        if count < len(document):
            lowest = _largest(near, count)
            is_best = near > lowest
            ties = (near == lowest).nonzero().flatten()
            is_best[ties[: count - int(is_best.sum())]] = True
            best = document[is_best].sum()
        else:
            best = document.sum()
        return round(float(best / document.sum().clamp_min(_AWAKE)), 4)

    def _scores(self, evidence: PromptEvidence, params: FilterParams) -> torch.Tensor:
        if isinstance(evidence, SegmentEvidence):
            return evidence.scores
        assert isinstance(evidence, Evidence)
        return self.score(evidence, params)

    def _segment_coverage(
        self, shares: torch.Tensor, firm: torch.Tensor, numbers: torch.Tensor
    ) -> float:
        """The rank of the best passage by what each segment's own attention shows, 0 to 1.

        It does not depend on the document's length, as the share of the best sixteenth does.
        """
        shares = shares[:1].clone() if torch.equal(shares[0], shares[1]) else shares.clone()
        shares[:, firm] = 0
        best = max(float(self._ranks(of_rows, numbers).max()) for of_rows in shares)
        return round(min(1.0, best), 4)

    def _ranks(self, scores: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
        """What each token's passage ranks by; without a passage, its best neighbour: [tokens]."""
        return torch.where(numbers > 0, rank_passages(scores, numbers), self._best_near(scores))

    def _passages(
        self, scores: torch.Tensor, evidence: PromptEvidence, budget: Budget, params: FilterParams
    ) -> tuple[tuple[int, int, int], ...]:
        """The passages of this budget with their strengths: see `FilterScores`."""
        num_tokens = evidence.num_tokens
        reserved = reserve(evidence.protected, num_tokens, budget.least_chosen)
        scores = scores.clone()
        scores[_as_index(reserved.firm, scores.device)] = 0
        room = _room(reserved, evidence, budget)
        limit = self.passage_limit(room, whole=params.keep == "auto")
        numbers = number_passages(num_tokens, evidence.breaks, limit)
        ranks = rank_passages(scores, torch.from_numpy(numbers).to(scores.device)).cpu().numpy()
        starts = np.flatnonzero(np.diff(numbers, prepend=-1))
        stops = np.append(starts[1:], num_tokens)
        is_passage = numbers[starts] > 0
        starts, stops = starts[is_passage], stops[is_passage]
        if len(starts) == 0:
            return ()
        of_passages = ranks[starts]
        codes = strengths(of_passages, 0.0, float(of_passages.max()))
        best = np.sort(np.argsort(-of_passages, kind="stable")[:MOST_PASSAGES])
        rows = zip(starts[best].tolist(), stops[best].tolist(), codes[best].tolist(), strict=True)
        return tuple(rows)

    def _head_scores(self, evidence: Evidence) -> tuple[tuple[HeadScores, ...], float]:
        """The scores of single heads, and the highest of them: see `FilterScores`."""
        layer = max(evidence.layers)
        counting = evidence.heads
        if counting is None:
            counting = tuple((layer, head) for head in range(len(evidence.filter_layer.queries)))
        every = [(i, h) for i, each in evidence.layers.items() for h in range(len(each.queries))]
        named = [*counting, *(head for head in every if head not in counting)]
        named = named[: min(MOST_HEADS, MOST_HEAD_SCORES // evidence.num_tokens)]
        scores = [self.score_of_heads(evidence, [head]).cpu().numpy() for head in named]
        high = max((float(of_head.max()) for of_head in scores), default=0.0)
        heads = tuple(
            HeadScores(
                layer=index,
                head=head,
                counts=(index, head) in counting,
                tokens=b64encode(strengths(of_head, 0.0, high).tobytes()).decode(),
            )
            for (index, head), of_head in zip(named, scores, strict=True)
        )
        return heads, high

    def _best_near(self, scores: torch.Tensor, limit: int | None = None) -> torch.Tensor:
        """The best score within `reach` tokens of each: [tokens].

        With `limit`, those that share one best token are no more than that.
        """
        reach = self.reach if limit is None else min(self.reach, (limit - 1) // 2)
        width = 2 * reach + 1
        return F.max_pool1d(scores[None, None], width, stride=1, padding=reach).flatten()


def _room(reserved: ReservedPositions, evidence: PromptEvidence, budget: Budget) -> int:
    """How many tokens passages have, if all separators are needed that there might be.

    One may stand beside each protected place, and one beside a passage.
    """
    num_between = len(evidence.separators.blank_line)
    beside = num_between * (1 + len(as_ranges(sorted(reserved.rest))))
    return budget.high - len(reserved.positions) - beside


def _scoring_heads(
    evidence: Evidence, scoring: Sequence[tuple[int, int]] | None
) -> list[tuple[LayerEvidence, torch.Tensor, torch.Tensor]]:
    """Layer, queries and keys of the heads that score, grouped by the keys they read."""
    if scoring is None:
        layer = evidence.filter_layer
        return [(layer, layer.queries, layer.keys)]
    heads = []
    for index, head in scoring:
        layer = evidence.layers[index]
        kv_head = head * layer.keys.shape[0] // layer.queries.shape[0]
        heads.append((layer, layer.queries[head, None], layer.keys[kv_head, None]))
    return heads


def _largest(values: torch.Tensor, count: int) -> torch.Tensor:
    """The smallest of the `count` largest values."""
    return values.kthvalue(len(values) - count + 1).values


def _as_index(positions: Sequence[int], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.asarray(positions, dtype=np.int64)).to(device)


def _without(taken: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """Which positions are not in `taken`: [tokens], bool."""
    is_free = torch.ones(num_tokens, dtype=torch.bool, device=taken.device)
    is_free[taken] = False
    return is_free


def _inputs(evidence: PromptEvidence, budget: Budget, params: FilterParams) -> SelectionInputs:
    breaks, separators = evidence.breaks, evidence.separators
    return SelectionInputs(
        protected=tuple((p.start, p.stop, int(p.priority)) for p in evidence.protected),
        paragraphs=_positions(breaks.paragraphs),
        sentences=_positions(breaks.sentences),
        lines=_positions(breaks.lines),
        with_line_end=_positions(breaks.with_line_end),
        enclosed=_positions(breaks.enclosing.starts),
        enclosing_starts=_positions(breaks.enclosing.line_starts),
        enclosing_stops=_positions(breaks.enclosing.line_stops),
        enclosing_headings=_positions(breaks.enclosing.is_heading),
        words=tuple(map(_positions, evidence.words)),
        between=len(separators.blank_line),
        line_end=len(separators.line_end),
        coverage_bound=evidence.coverage_bound,
        fallback=params.fallback,
        limit=budget.limit,
    )


def _positions(positions: Sequence[int] | npt.NDArray[np.integer[Any]]) -> str:
    return b64encode(np.array(positions, dtype="<u4").tobytes()).decode()
