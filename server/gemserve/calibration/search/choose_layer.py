"""Chooses the filter layer and heads of a model by their recall on probes.

Every probe is read once, and every head of every layer is scored by what it would keep. The chosen
layer is the earliest one whose best heads, with those of the layers below it, find about as much as
any heads of the model. Probes of other wording, names and numbers then confirm the choice by the
model's answers, and give the bound of coverage below which a choice is not trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import torch

from gemserve.calibration.files import Calibration
from gemserve.calibration.search import choose_keep
from gemserve.calibration.search.choose_window import PROBE_TOKENS, SIZES, choose_window
from gemserve.calibration.search.coverage_bound import judge_coverage
from gemserve.calibration.search.head_search import (
    SHARES,
    Observation,
    ProbeObservations,
    best_heads,
    observation_of,
    recall_of,
    single_recalls,
)
from gemserve.calibration.search.observe import observe
from gemserve.calibration.search.probes import PROBE_KINDS, Probe, draw_probes
from gemserve.calibration.search.result import (
    CalibrationResult,
    KeepResult,
    LayerResult,
    WindowResult,
    rounded_mean,
)
from gemserve.engine.core import Core
from gemserve.errors import ConfigError
from gemserve.evaluation.answers import answer_all
from gemserve.evaluation.metrics import score_answer
from gemserve.filtering.kept_ranges import KeptRanges
from gemserve.filtering.method_cost import prompt_flops
from gemserve.filtering.sieve import Sieve
from gemserve.ranges import as_ranges

# A layer whose recall is this close to the best, or differs by one probe, counts as equally good;
# of those the earliest is the fastest.
TOLERANCE = 0.02
# A kind of probe says nothing about this model if no head reaches this recall on it.
FINDABLE = 0.5
# A calibration fails if the best heads do not reach this recall.
LEAST_RECALL = 0.7
CANDIDATES = 3
_ANSWER_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much a calibration reads: lengths of its probes, and how many of each kind.

    `confirms`: probes of each kind that confirm the best layers by answers. With 0 the layers are
    confirmed by recall alone. `answers`: about how many probes are answered from budgets of each
    size; with 0 that is not measured.
    """

    lengths: tuple[int, ...] = (1024, 2048)
    samples: int = 3
    confirms: int = 2
    answers: int = 40
    seed: int = 0


SHORT = Effort(lengths=(1024,), samples=2, confirms=0, answers=0)
ReportProgress = Callable[[str], None]
_Result = TypeVar("_Result")


def calibrate(core: Core, effort: Effort, progress: ReportProgress) -> CalibrationResult:
    """Choose layer, heads and rows, and the bound of coverage.

    `progress` is called after every probe. An interrupt (Ctrl-C) ends the reading. If every kind of
    probe has been read by then, the choice is made from those, and the result is partial. Raises
    `ConfigError` if the probes do not distinguish the layers.
    """
    lengths, samples = effort.lengths, effort.samples
    probes = draw_probes(core.tokenizer, "calibration", lengths, samples, effort.seed)
    observations: list[ProbeObservations] = []
    measuring = _Measuring()
    measuring.result_of(lambda: _observe_all(core, probes, progress, observations))
    if measuring.is_over and len({o[0].kind for o in observations}) < len(PROBE_KINDS):
        raise KeyboardInterrupt
    kinds = _findable(observations)
    observations = [o for o in observations if o[0].kind in kinds and _has_gold(o)]
    questions = [question for question, _, _ in observations]
    layers = _search(core, questions, lengths)
    check_found(layers, len(questions))
    candidates = _candidates(layers, len(questions))
    others: list[Probe] = []
    if not measuring.is_over:
        count = effort.confirms or 1
        others = draw_probes(core.tokenizer, "confirmation", lengths[:1], count, effort.seed)
        others = [probe for probe in others if probe.kind in kinds]
    other_observations: list[ProbeObservations] = []
    measuring.result_of(lambda: _observe_all(core, others, progress, other_observations))
    pairs = [pair for pair in zip(others, other_observations, strict=False) if _has_gold(pair[1])]
    others, other_observations = [probe for probe, _ in pairs], [o for _, o in pairs]
    full_score = None
    if effort.confirms and others:
        tried = candidates
        confirmed_by_answers = measuring.result_of(
            lambda: _confirm(core, tried, others, other_observations)
        )
        candidates, full_score = confirmed_by_answers or (candidates, None)
    chosen = _earliest(candidates, max(1, len(others)))
    by_layer = {row.layer: row for row in candidates}
    confirmed = [recall_of(chosen.heads, o[0], chosen.ends_with) for o in other_observations]
    trust = judge_coverage(chosen, observations, other_observations)
    windows: tuple[WindowResult, ...] = ()
    if effort.confirms:
        windows = measuring.result_of(lambda: _windows(core, chosen, kinds, effort, progress)) or ()
    found = Calibration(
        layer=chosen.layer,
        heads=chosen.heads,
        ends_with=chosen.ends_with,
        coverage_bound=trust.bound,
        is_measured=True,
        window=windows[0].window if windows else Calibration.USUAL_WINDOW,
        window_bound=windows[0].bound if windows else Calibration.USUAL_WINDOW_BOUND,
    )
    keeps: tuple[KeepResult, ...] = ()
    if effort.answers:
        keeps = measuring.result_of(lambda: _keeps(core, found, kinds, effort, progress)) or ()
    return CalibrationResult(
        layers=tuple(by_layer.get(row.layer, row) for row in layers),
        chosen=chosen,
        trust=trust,
        kinds=kinds,
        num_probes=len(questions),
        full_score=full_score,
        confirmed_recall=rounded_mean(confirmed) if confirmed else None,
        windows=windows,
        keeps=keeps,
        is_partial=measuring.is_over,
    )


class _Measuring:
    """Measures one thing after the other until an interrupt (Ctrl-C) comes."""

    def __init__(self) -> None:
        self.is_over = False

    def result_of(self, measure: Callable[[], _Result]) -> _Result | None:
        """What `measure` returns; None if an interrupt has come, or comes meanwhile."""
        if self.is_over:
            return None
        try:
            return measure()
        except KeyboardInterrupt:
            self.is_over = True
            return None


def _windows(
    core: Core,
    chosen: LayerResult,
    kinds: Sequence[str],
    effort: Effort,
    progress: ReportProgress,
) -> tuple[WindowResult, ...]:
    """How well windows of each size find the facts of long probes, if the context has room."""
    length = min(PROBE_TOKENS, 3 * core.model.context_tokens // 4)
    if length <= min(SIZES):
        return ()
    probes = draw_probes(core.tokenizer, "calibration", (length,), effort.confirms, effort.seed)
    probes = [probe for probe in probes if probe.kind in kinds]
    return choose_window(core, chosen, probes, progress)


def _keeps(
    core: Core,
    found: Calibration,
    kinds: Sequence[str],
    effort: Effort,
    progress: ReportProgress,
) -> tuple[KeepResult, ...]:
    """How well the model answers from budgets of each size, if the context has room for probes."""
    length = min(choose_keep.PROBE_TOKENS, 3 * core.model.context_tokens // 4)
    if length <= 2 * max(choose_keep.KEEPS):
        return ()
    samples = -(-effort.answers // len(kinds))
    probes = draw_probes(core.tokenizer, "confirmation", (length,), samples, effort.seed + 1)
    probes = [probe for probe in probes if probe.kind in kinds]
    return choose_keep.choose_keep(core, found, probes, progress)


def _has_gold(observations: ProbeObservations) -> bool:
    """Whether a choice can miss something. A fully protected answer cannot be missed."""
    return len(observations[0].gold) > 0


def check_found(layers: Sequence[LayerResult], num_probes: int) -> None:
    """Raise `ConfigError` if the probes do not distinguish the layers."""
    advice = "nothing was written; other lengths or more samples may tell"
    if num_probes == 0 or not layers:
        raise ConfigError(f"no head of this model finds any kind of probe: {advice}")
    best = max(row.recall for row in layers)
    if best < LEAST_RECALL:
        raise ConfigError(
            f"the best heads find {best:.2f} of what is asked for, less than {LEAST_RECALL}: "
            f"{advice}"
        )
    singles = [row.own_recall for row in layers]
    if len(singles) > 1 and max(singles) == min(singles):
        raise ConfigError(f"all layers do equally well, {max(singles):.2f}: {advice}")


def _observe_all(
    core: Core,
    probes: Sequence[Probe],
    progress: ReportProgress,
    observations: list[ProbeObservations],
) -> None:
    """Add what every head attends to in each probe."""
    for probe in probes:
        observations.append(_observe(core, probe))
        progress(f"{probe.kind} probe of {len(probe.example.prompt.ids)} tokens")


def _observe(core: Core, probe: Probe) -> ProbeObservations:
    """What every head attends to, for the three questions of a probe."""
    selector = Sieve()
    question_rows = [selector.rows(len(p.ids), p.question, False) for p in probe.prompts]
    rows = [
        [*wanted, *range(wanted[-1] + 1, len(prompt.ids))]
        for prompt, wanted in zip(probe.prompts, question_rows, strict=True)
    ]
    golds = (probe.example.gold, (), ())
    evidences = observe(core, probe.prompts, rows)
    observations = []
    for evidence, gold, wanted in zip(evidences, golds, question_rows, strict=True):
        observations.append(observation_of(evidence, probe.kind, gold, len(wanted)))
    fact, absent, diffuse = observations
    return fact, absent, diffuse


def _findable(observations: Sequence[ProbeObservations]) -> tuple[str, ...]:
    """The kinds of probes that some head can find. A small model may not know all of them."""
    kinds = []
    for kind in dict.fromkeys(question.kind for question, _, _ in observations):
        questions = [q for q, _, _ in observations if q.kind == kind and len(q.gold)]
        if not questions:
            continue
        best = max(float(single_recalls(questions, e).mean(dim=0).amax()) for e in (False, True))
        if best >= FINDABLE:
            kinds.append(kind)
    return tuple(kinds)


def _search(
    core: Core, questions: Sequence[Observation], lengths: Sequence[int]
) -> list[LayerResult]:
    """The best heads and rows up to each layer. The question's rows alone, if that is as good."""
    if not questions:
        return []
    singles = {ends_with: single_recalls(questions, ends_with) for ends_with in (False, True)}
    shape, length = core.model.shape, max(lengths)
    keep = length // 16
    whole = prompt_flops(shape, "none", length, keep, 0)
    layers: list[LayerResult] = []
    for position, layer in enumerate(questions[0].layers):
        tried = {e: best_heads(questions, singles[e], layer, e) for e in (False, True)}
        ends_with = tried[True][1] > tried[False][1] + TOLERANCE
        heads, recall = tried[ends_with]
        layers.append(
            LayerResult(
                layer=layer,
                heads=heads,
                ends_with=ends_with,
                recall=round(recall, 4),
                own_recall=round(float(singles[ends_with].mean(dim=0)[position].amax()), 4),
                work=round(prompt_flops(shape, "sieve", length, keep, layer) / whole, 4),
            )
        )
    return layers


def _candidates(layers: Sequence[LayerResult], num_probes: int) -> list[LayerResult]:
    """The earliest layers that do about as well as the best one, and contribute a head."""
    best = max(layers, key=lambda row: row.recall)
    least = max(LEAST_RECALL, best.recall - max(TOLERANCE, 1.5 / num_probes))
    close = [
        row
        for row in layers
        if row.recall >= least and any(layer == row.layer for layer, _ in row.heads)
    ]
    return close[:CANDIDATES] or [best]


def _confirm(
    core: Core,
    candidates: Sequence[LayerResult],
    probes: Sequence[Probe],
    observations: Sequence[ProbeObservations],
) -> tuple[list[LayerResult], float]:
    """The candidates with scores of their answers to `probes`, and the score of whole prompts.

    A candidate answers from the tokens of a probe that its heads keep.
    """
    examples = [probe.example for probe in probes]
    tries = [
        [_kept_ids(probe, o[0], row) for probe, o in zip(probes, observations, strict=True)]
        for row in candidates
    ]
    tries.append([list(example.prompt.ids) for example in examples])
    texts = answer_all(core, [ids for tried in tries for ids in tried], _ANSWER_TOKENS)
    scores = []
    for start in range(0, len(texts), len(examples)):
        answers = texts[start : start + len(examples)]
        scores.append(
            rounded_mean([score_answer(t, e) for t, e in zip(answers, examples, strict=True)])
        )
    pairs = zip(candidates, scores[:-1], strict=True)
    confirmed = [replace(row, score=score) for row, score in pairs]
    return confirmed, scores[-1]


def _kept_ids(probe: Probe, question: Observation, row: LayerResult) -> list[int]:
    """The tokens of a probe that these heads keep: a sixteenth of the document, and the frame."""
    prompt, document = probe.example.prompt, question.document
    scores = torch.zeros(len(prompt.ids))
    scores[question.document] = question.of(row.heads, row.ends_with)
    count = max(1, round(SHARES[0] * len(document)))
    sieve, is_free = Sieve(), np.zeros(len(prompt.ids), dtype=np.bool_)
    is_free[question.document] = True
    limit = sieve.passage_limit(count)
    numbers = sieve.passage_numbers(scores, prompt.breaks, limit)
    passages = sieve.ranked(scores, numbers, is_free, limit)
    kept = KeptRanges(as_ranges(np.flatnonzero(~is_free).tolist()))
    passages.fill(kept, kept.size + count)
    return [prompt.ids[p] for start, stop in kept.ranges for p in range(start, stop)]


def _earliest(candidates: Sequence[LayerResult], num_probes: int) -> LayerResult:
    """The earliest candidate whose answers are not clearly worse than the best one's.

    "Not clearly worse" means within one and a half standard errors of a paired difference, computed
    as if a quarter of the pairs differed.
    """
    scores = [row.score for row in candidates if row.score is not None]
    if not scores or max(scores) == 0:
        return candidates[0]
    least = max(scores) - 1.5 * (0.25 / num_probes) ** 0.5
    return next(row for row in candidates if row.score is not None and row.score >= least)
