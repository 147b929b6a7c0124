"""The inspector page chooses for other budgets by itself, from scores that it has been sent."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from gemserve.filter_plan import Budget
from gemserve.filtering.score_report import report_scores
from gemserve.filtering.selector import Evidence, LayerEvidence
from gemserve.filtering.sieve import Sieve
from gemserve.scores import MOST_PASSAGES
from gemserve.types import FilterParams, Priority, ProtectedRange, TextBreaks
from gemserve_kernels import select_backend

PAGE = Path(__file__).parents[2] / "server/gemserve/inspector/selection.js"
PROGRAM = """
import {readFileSync} from "node:fs";
import {decodeScores, choose, rangesOf} from %s;
const cases = JSON.parse(readFileSync(0, "utf8"));
const results = cases.map(({scores, budgets}) => budgets.map((budget) => {
  const choice = choose(decodeScores(scores), budget);
  return {ranges: rangesOf(choice.kept), coverage: choice.coverage, reason: choice.reason};
}));
console.log(JSON.stringify(results));
"""


class GivenScores(Sieve):
    """Sieve over scores that are made by hand."""

    def score(self, evidence: Evidence, params: FilterParams) -> torch.Tensor:
        return evidence.filter_layer.keys[0, :, 0].clone()


def draw(rng: random.Random) -> tuple[Evidence, bool]:
    """A prompt with random breaks, protected ranges and scores, many of which tie."""
    n = rng.randrange(40, 3000)
    generator = torch.Generator().manual_seed(rng.randrange(1 << 30))
    scores = torch.rand(n, generator=generator) ** rng.choice((1, 8, 40))
    if rng.random() < 0.3:
        scores = (scores * 8).round() / 8
    scores[0] = 0
    starts = sorted(rng.sample(range(n), rng.randrange(0, n // 8)))
    levels = [tuple(s for s in starts if rng.random() < share) for share in (0.2, 0.7, 1)]
    ranges = [ProtectedRange(0, 1, Priority.BOS)]
    for priority in Priority:
        start = rng.randrange(n)
        ranges.append(ProtectedRange(start, start + rng.randrange(1, 80), priority))
    evidence = Evidence(
        num_tokens=n,
        layers={
            0: LayerEvidence(
                queries=torch.zeros(1, 1, 1), keys=scores[None, :, None], scale=1.0, softcap=None
            )
        },
        rows=[n - 1],
        backend=select_backend(torch.device("cpu")),
        protected=tuple(ranges),
        breaks=TextBreaks(paragraphs=levels[0], sentences=levels[1], lines=levels[2]),
        coverage_bound=rng.choice((0.0, 0.2, 0.6)),
    )
    return evidence, rng.random() < 0.5


def run_page(cases: list[dict[str, Any]], folder: Path) -> Any:
    node = shutil.which("node", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if node is None:
        pytest.skip("there is no node")
    program = folder / "program.mjs"
    program.write_text(PROGRAM % json.dumps(PAGE.as_uri()), encoding="utf-8")
    done = subprocess.run(
        [node, program], input=json.dumps(cases), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def ranges_of(positions: list[int]) -> list[list[int]]:
    from gemserve.ranges import as_ranges

    return [list(r) for r in as_ranges(positions)]


def test_the_page_chooses_what_the_server_chooses(tmp_path: Path) -> None:
    """A slider that shows another selection than the server's would be a lie."""
    rng = random.Random(0)
    cases, expected = [], []
    for _ in range(60):
        evidence, fallback = draw(rng)
        n = evidence.num_tokens
        params = FilterParams(method="sieve", keep=16, fallback=fallback, return_scores="exact")
        limit = rng.choice((n, n // 2))
        budgets = sorted({16, n - 1, *(rng.randrange(16, n) for _ in range(8))})
        choices = []
        for keep in budgets:
            budget = Budget(low=keep, high=keep, limit=max(keep, limit) if fallback else keep)
            choices.append(GivenScores().choose(evidence, budget, params))
        scores = choices[0].scores
        assert scores is not None
        asked = Budget(low=16, high=16, limit=limit if fallback else 16)
        report = report_scores(scores, GivenScores(), evidence, asked, params, 1.0)
        cases.append({"scores": asdict(report), "budgets": budgets})
        expected.append(choices)
    for shown, choices in zip(run_page(cases, tmp_path), expected, strict=True):
        for told, choice in zip(shown, choices, strict=True):
            assert told["ranges"] == ranges_of(choice.positions.tolist())
            assert told["coverage"] == pytest.approx(choice.coverage, abs=2e-4)
            assert (told["reason"] is not None) == choice.is_diffuse


@pytest.mark.parametrize("form", [True, "exact"])
def test_a_report_s_size_is_bounded(form: Any) -> None:
    n = 60_000
    keys = torch.rand(1, n, 1)
    every = tuple(range(0, n, 8))
    evidence = Evidence(
        num_tokens=n,
        layers={0: LayerEvidence(queries=torch.zeros(1, 1, 1), keys=keys, scale=1.0, softcap=None)},
        rows=[n - 1],
        backend=select_backend(torch.device("cpu")),
        protected=(),
        breaks=TextBreaks(paragraphs=every[::4], sentences=every, lines=every),
    )
    params = FilterParams(method="sieve", keep=16, return_scores=form)
    budget = Budget(low=16, high=16, limit=16)
    report = report_scores(keys[0, :, 0], GivenScores(), evidence, budget, params, 3.0)
    assert len(report.passages) <= MOST_PASSAGES
    size = len(json.dumps(asdict(report)))
    assert size < (6 * n if form == "exact" else 2 * n) + 40 * MOST_PASSAGES
