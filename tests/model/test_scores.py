"""The scores in a filter report: those that the choice was made by."""

from __future__ import annotations

import json
from base64 import b64decode
from dataclasses import asdict
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from gemserve.contract.filter_options import FilterParams
from gemserve.contract.filter_plan import Budget
from gemserve.contract.prompt_parts import (
    EnclosingLines,
    Priority,
    ProtectedRange,
    Separators,
    TextBreaks,
)
from gemserve.contract.reports import FilterReport
from gemserve.contract.scores import MOST_PASSAGES
from gemserve.filtering import sieve
from gemserve.filtering.protected_budget import count_always_read
from gemserve.filtering.score_report import report_scores
from gemserve.filtering.selector import Evidence, LayerEvidence
from gemserve.filtering.sieve import Sieve
from gemserve.ranges import as_ranges
from gemserve_kernels import select_backend
from tests.model.test_query_rows import core_of, ids_of, request, serve

N = 400
BREAKS = TextBreaks(paragraphs=tuple(range(0, N, 28)))
PROTECTED = (ProtectedRange(N - 20, N, Priority.QUESTION),)


def report_of(method: str = "sieve", scores: Any = True, **params: Any) -> FilterReport:
    params = {"method": method, "return_scores": scores, **params}
    one = request(ids_of(N), ((N - 20, N),), params=params, breaks=BREAKS, protected=PROTECTED)
    report, _ = serve(core_of(), one)
    return report


def test_scores_are_quantised_to_one_byte_a_token() -> None:
    exact, coarse = report_of(scores="exact").scores, report_of().scores
    assert exact is not None
    assert coarse is not None
    values = np.frombuffer(b64decode(exact.tokens), "<f4")
    codes = np.frombuffer(b64decode(coarse.tokens), np.uint8)
    assert len(values) == len(codes) == N
    # two passes, whose chunks may differ, and with them the last bits
    ends = (float(values.min()), float(values.max()))
    assert (coarse.low, coarse.high) == pytest.approx(ends, rel=1e-5)
    restored = coarse.low + (coarse.high - coarse.low) * (codes / 255.0) ** 2
    assert np.abs(restored - values).max() <= (coarse.high - coarse.low) * 2.01 / 255 + 1e-7
    assert coarse.inputs is None
    assert exact.inputs is not None
    assert np.frombuffer(b64decode(exact.inputs.paragraphs), "<u4").tolist() == list(
        BREAKS.paragraphs
    )


def test_the_best_passages_are_those_kept() -> None:
    report = report_of()
    assert report.scores is not None
    assert report.selection is not None
    kept = {i for start, stop in report.selection for i in range(start, stop)}
    best = max(report.scores.passages, key=lambda passage: passage[2])
    assert best[2] == 255
    assert set(range(*best[:2])) <= kept
    assert report.scores.passages == tuple(sorted(report.scores.passages))


def test_passages_leave_room_for_separators() -> None:
    """They were reported as larger ones than those that were chosen from."""
    head = ProtectedRange(0, 4, Priority.HEAD)
    breaks = TextBreaks(paragraphs=tuple(range(0, N, 37)), lines=tuple(range(N)))
    params = {"method": "sieve", "keep": 200, "return_scores": True}
    one = request(
        ids_of(N),
        ((N - 20, N),),
        params=params,
        breaks=breaks,
        protected=(head, *PROTECTED),
        separators=Separators(blank_line=(5, 5), line_end=(5,)),
    )
    report, _ = serve(core_of(), one)
    assert report.scores is not None
    assert Sieve().passage_limit(200 - 4) == 37
    assert max(stop - start for start, stop, _ in report.scores.passages) == 36


def test_asking_for_scores_changes_no_choice() -> None:
    assert report_of(scores=False).scores is None
    assert report_of(scores=False).selection == report_of(scores="exact").selection


@pytest.mark.parametrize(
    ("method", "has_scores"), [("gemfilter", True), ("position", False), ("none", False)]
)
def test_methods_without_scores_report_none(method: str, has_scores: bool) -> None:
    scores = report_of(method).scores
    assert (scores is not None) == has_scores
    if scores is not None:
        assert scores.passages == ()
        assert scores.whole_ratio > 1


def test_the_heads_scores_make_the_scores() -> None:
    """The page colours by them: the largest of those that count is the score."""
    scores = report_of(scores="heads").scores
    assert scores is not None
    values = np.frombuffer(b64decode(scores.tokens), "<f4")
    counting = [head for head in scores.heads if head.counts]
    assert [(head.layer, head.head) for head in counting] == [(0, 1), (1, 2), (2, 3)]
    assert len(scores.heads) == 3 * 4, "the other heads of these layers come behind"
    codes = np.stack([np.frombuffer(b64decode(head.tokens), np.uint8) for head in counting])
    restored = scores.heads_high * (codes.max(axis=0) / 255.0) ** 2
    assert np.abs(restored - values).max() <= scores.heads_high * 2.01 / 255


@pytest.mark.parametrize("heads", [((1, 3),), ((2, 0), (0, 2), (1, 1))])
def test_the_heads_of_a_request_choose(
    heads: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the scores of these heads alone, and not by those of the calibration."""
    seen: list[torch.Tensor] = []
    calibrated = report_of(scores="exact")
    own = Sieve.choose

    def spy(self: Sieve, evidence: Evidence, *rest: Any) -> Any:
        assert evidence.heads == heads
        seen.append(self.score_of_heads(evidence, heads))
        return own(self, evidence, *rest)

    monkeypatch.setattr(Sieve, "choose", spy)
    report = report_of(scores="heads", heads=heads)
    assert report.scores is not None
    assert calibrated.scores is not None
    assert b64decode(report.scores.tokens) == seen[0].numpy().tobytes()
    assert report.scores.tokens != calibrated.scores.tokens
    counting = [(head.layer, head.head) for head in report.scores.heads if head.counts]
    assert counting == list(heads)
    assert report.selection != calibrated.selection


def test_the_size_of_heads_scores_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sieve, "MOST_HEAD_SCORES", 5 * N)
    scores = report_of(scores="heads").scores
    assert scores is not None
    assert [head.counts for head in scores.heads] == [True] * 3 + [False] * 2
    assert report_of(scores="exact").scores.heads == ()  # type: ignore[union-attr]


class GivenScores(Sieve):
    """Sieve over scores that are made by hand: keys of one head and one number."""

    def score(self, evidence: Evidence, params: FilterParams) -> torch.Tensor:
        return evidence.filter_layer.keys[0, :, 0].clone()


STRUCTURE = TextBreaks(
    paragraphs=BREAKS.paragraphs,
    lines=tuple(range(0, N, 7)),
    with_line_end=np.arange(13, N, 14, dtype=np.uint32),
    enclosing=EnclosingLines(
        starts=np.array([20, 100, 200, 207], dtype=np.uint32),
        line_starts=np.array([14, 0, 28, 200], dtype=np.uint32),
        line_stops=np.array([20, 0, 34, 205], dtype=np.uint32),
        is_heading=np.array([1, 0, 0, 0], dtype=np.uint32),
    ),
)


@pytest.mark.parametrize("breaks", [BREAKS, STRUCTURE], ids=["plain", "enclosing lines"])
@pytest.mark.parametrize("keep", [16, 64, 200])
def test_exact_scores_are_all_that_a_choice_needs(keep: int, breaks: TextBreaks) -> None:
    """A client that chooses for other budgets knows of the prompt only what is sent."""
    params = {"method": "sieve", "keep": keep, "return_scores": "exact", "lexical": "auto"}
    one = request(
        ids_of(N),
        ((N - 20, N),),
        params=params | {"return_selection": True},
        breaks=breaks,
        protected=PROTECTED,
        words=(np.array([40, 41, 300]), np.array([7, N - 3])),
        separators=Separators(blank_line=(5, 5), line_end=(5,)),
    )
    report, _ = serve(core_of(), one)
    assert report.scores is not None
    assert report.scores.inputs is not None
    inputs = report.scores.inputs
    assert inputs.between == 2
    evidence = evidence_of(report)
    always = count_always_read(evidence.protected, N)
    assert report.protected_tokens == always > 0
    read = report.kept_tokens + report.added_tokens - always
    assert 0 <= keep - read < Sieve().passage_limit(keep) + 2
    budget = Budget(low=keep + always, high=keep + always, limit=inputs.limit, protected=always)
    params = FilterParams(method="sieve", keep=keep, fallback=inputs.fallback)
    choice = GivenScores().choose(evidence, budget, params)
    assert as_ranges(choice.positions.tolist()) == report.selection


def evidence_of(report: FilterReport) -> Evidence:
    """What a client knows of a prompt from the exact scores in a reply."""
    scores = report.scores
    assert scores is not None
    assert scores.inputs is not None
    inputs = scores.inputs
    values = torch.from_numpy(np.frombuffer(b64decode(scores.tokens), "<f4").copy())

    def places(text: str) -> npt.NDArray[np.uint32]:
        return np.frombuffer(b64decode(text), "<u4")

    levels = [
        tuple(places(level).tolist())
        for level in (inputs.paragraphs, inputs.sentences, inputs.lines)
    ]
    enclosing = EnclosingLines(
        starts=places(inputs.enclosed),
        line_starts=places(inputs.enclosing_starts),
        line_stops=places(inputs.enclosing_stops),
        is_heading=places(inputs.enclosing_headings),
    )
    return Evidence(
        num_tokens=report.prompt_tokens,
        layers={0: a_layer(values[None, :, None])},
        rows=[report.prompt_tokens - 1],
        backend=select_backend(torch.device("cpu")),
        protected=tuple(ProtectedRange(a, b, Priority(c)) for a, b, c in inputs.protected),
        breaks=TextBreaks(
            paragraphs=levels[0],
            sentences=levels[1],
            lines=levels[2],
            with_line_end=places(inputs.with_line_end),
            enclosing=enclosing,
        ),
        coverage_bound=inputs.coverage_bound,
        words=tuple(places(at).astype(np.int64) for at in inputs.words),
        separators=Separators(blank_line=(5,) * inputs.between, line_end=(5,) * inputs.line_end),
    )


def a_layer(keys: torch.Tensor) -> LayerEvidence:
    return LayerEvidence(queries=torch.zeros(1, 1, 1), keys=keys, scale=1.0, softcap=None)


@pytest.mark.parametrize("form", [True, "exact"])
def test_a_report_s_size_is_bounded(form: Any) -> None:
    n = 60_000
    keys = torch.rand(1, n, 1)
    every = tuple(range(0, n, 8))
    evidence = Evidence(
        num_tokens=n,
        layers={0: a_layer(keys)},
        rows=[n - 1],
        backend=select_backend(torch.device("cpu")),
        protected=(),
        breaks=TextBreaks(paragraphs=every[::4], sentences=every, lines=every),
    )
    params = FilterParams(method="sieve", keep=16, return_scores=form)
    budget = Budget(low=16, high=16, limit=16)
    report = report_scores(keys[0, :, 0], Sieve(), evidence, budget, params, 3.0)
    assert len(report.passages) <= MOST_PASSAGES
    size = len(json.dumps(asdict(report)))
    assert size < (6 * n if form == "exact" else 2 * n) + 40 * MOST_PASSAGES
