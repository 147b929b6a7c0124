"""Chooses the filter layer and heads of a model by their recall on probes.

Every probe is read once, and every head of every layer is scored by what it would keep. Heads that
repeat the question's words are found in the first layers of every model; only deeper ones find what
is said in other words. So the chosen layer is the earliest one whose best heads, with those of the
layers below it, find by meaning about as much as any heads of the model. Probes of other wording,
names and numbers then confirm the choice.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import Literal, TypeVar

import torch

from gemserve.calibration.files import Calibration
from gemserve.calibration.search import choose_keep
from gemserve.calibration.search.choose_segment import PROBE_TOKENS, SIZES, choose_segment
from gemserve.calibration.search.coverage_bound import judge_coverage
from gemserve.calibration.search.head_search import (
    Observation,
    ProbeObservations,
    balanced,
    best_heads,
    observation_of,
    recall_of,
    single_recalls,
)
from gemserve.calibration.search.observe import observe
from gemserve.calibration.search.probes import PROBE_KINDS, WORD_KINDS, Probe, draw_probes
from gemserve.calibration.search.result import (
    CalibrationResult,
    KeepResult,
    LayerResult,
    SegmentResult,
    rounded_mean,
)
from gemserve.config import DEFAULT_KEEP
from gemserve.engine.core import Core
from gemserve.errors import ConfigError
from gemserve.filtering.method_cost import prompt_flops
from gemserve.filtering.sieve import Sieve
from gemserve.model.passes.attention import NO_PAUSES, Breaks
from gemserve.prompting.prompt import Prompt

# A layer whose recall is this close to the best counts as equally good; of those the earliest is
# the fastest.
TOLERANCE = 0.03
# The rows behind the question are watched only where that finds more than this.
_ENDS_GAIN = 0.02
# A kind of probe says nothing about this model if no head reaches this recall on it.
FINDABLE = 0.5
# A model understands no other words if its best heads do not reach this recall by meaning: those
# that do best on a few probes do so by chance.
LEAST_MEANING = 0.6
# A calibration fails if the best heads do not reach this recall.
LEAST_RECALL = 0.7
# A filter layer deeper than this share of the layers saves too little.
DEEPEST = 0.625
_QUESTIONS = 10  # of a document in prose and another one, about
TIMED = (4096, 32768)  # lengths in tokens for which the time to the first token is estimated

Preference = Literal["quality", "speed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much a calibration reads: lengths of its probes, and how many of them.

    `samples`: documents in English prose of each length, and as many others. `confirms`: of other
    wording, which confirm the choice. `windows`: of several segments' length. `answers`: about how
    many questions are answered from budgets of each size. With 0 of them that is not measured.
    `prefers`: the layer that finds what is said in other words, or the cheapest that finds the
    question's words. `sees_all`: layers are measured that are too deep to be chosen, too.
    """

    lengths: tuple[int, ...] = (1024, 2048)
    samples: int = 6
    confirms: int = 6
    windows: int = 1
    answers: int = 40
    seed: int = 0
    prefers: Preference = "quality"
    sees_all: bool = True


SHORT = Effort(lengths=(768,), samples=4, confirms=0, windows=0, answers=0, sees_all=False)
# Called with the phase, and how many of its parts are done, of how many.
ReportProgress = Callable[[str, int, int], None]
_Result = TypeVar("_Result")


def calibrate(
    core: Core,
    effort: Effort,
    progress: ReportProgress,
    breaks: Breaks = NO_PAUSES,
    clock: Callable[[], float] = time.monotonic,
) -> CalibrationResult:
    """Choose layer, heads and rows, and the bound of coverage.

    `progress` is called after every part. `breaks.pause` is called often, until segments and
    answers are measured, and `clock` gives seconds without those of the pauses. An interrupt
    (Ctrl-C) ends the reading. If a probe of every subject has been read by then, the choice is made
    from those, and the result is partial. Raises `ConfigError` if the probes do not distinguish the
    layers.
    """
    lengths = effort.lengths
    deepest = core.model.num_layers - 1
    if not effort.sees_all:
        deepest = _deepest(core.model.num_layers)
    drawn = draw_probes(
        core.tokenizer, "calibration", lengths, effort.samples, effort.seed, breaks.pause
    )
    probes = _fitting(core, drawn)
    if not probes:
        raise ConfigError(
            f"the longest prompt here, of {core.config.max_prompt_tokens} tokens, is too short "
            "for a probe"
        )
    read: list[ProbeObservations] = []
    measuring = _Measuring()
    measuring.result_of(
        lambda: _observe_all(core, probes, deepest, progress, read, "probes", breaks)
    )
    subjects = {probe.subject for probe in probes}
    if measuring.is_over and {probe.subject for probe in probes[: len(read)]} != subjects:
        raise KeyboardInterrupt
    rate = _measure_rate(core, probes[0].prompts[0], deepest, breaks, clock)
    questions = [fact for probe in read for fact in probe.facts if len(fact.gold)]
    kinds = _findable(questions, breaks.pause)
    questions = [question for question in questions if question.kind in kinds]
    layers = _search(core, questions, max(lengths), rate, breaks.pause)
    low = _low(layers, core.model.num_layers)
    if max((row.meaning or 0.0 for row in low), default=0.0) < LEAST_MEANING:
        kinds = tuple(kind for kind in kinds if kind in WORD_KINDS)
        questions = [question for question in questions if question.kind in kinds]
        layers = _search(core, questions, max(lengths), rate, breaks.pause)
    check_found(_low(layers, core.model.num_layers), len(questions))
    chosen = _choose(layers, effort.prefers, core.model.num_layers)
    confirming: list[ProbeObservations] = []
    if effort.confirms:
        others = draw_probes(
            core.tokenizer, "confirmation", lengths[:1], effort.confirms, effort.seed
        )
        others = _fitting(core, others)
        layer = chosen.layer
        measuring.result_of(
            lambda: _observe_all(core, others, layer, progress, confirming, "confirmation", breaks)
        )
    trust = judge_coverage(chosen, _only(read, kinds), _only(confirming, kinds))
    segments = measuring.result_of(lambda: _segments(core, chosen, kinds, effort, progress)) or ()
    found = Calibration(
        layer=chosen.layer,
        heads=chosen.heads,
        ends_with=chosen.ends_with,
        coverage_bound=trust.bound,
        is_measured=True,
        window=segments[0].window if segments else Calibration.USUAL_SEGMENT,
        window_bound=trust.window_bound,
    )
    keeps, whole_score = measuring.result_of(
        lambda: _keeps(core, found, kinds, effort, progress)
    ) or ((), None)
    whole = _prompt_times(core, None, rate)
    return CalibrationResult(
        layers=tuple(layers),
        chosen=chosen,
        trust=trust,
        kinds=kinds,
        num_probes=len(questions),
        prefers=effort.prefers,
        recalls=_by_kind(chosen, questions),
        confirmed=_by_kind(chosen, [f for p in _only(confirming, kinds) for f in p.facts]),
        whole_s=whole,
        segments=segments,
        keeps=keeps,
        whole_score=whole_score,
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


def _segments(
    core: Core,
    chosen: LayerResult,
    kinds: Sequence[str],
    effort: Effort,
    progress: ReportProgress,
) -> tuple[SegmentResult, ...]:
    """How well segments of each size find the facts of long probes, if the context has room."""
    length = min(PROBE_TOKENS, 3 * core.model.context_tokens // 4)
    if not effort.windows or length <= min(SIZES):
        return ()
    probes = draw_probes(core.tokenizer, "calibration", (length,), effort.windows, effort.seed)
    of_kinds = (
        replace(probe, examples=tuple(e for e in probe.examples if e.subtask in kinds))
        for probe in probes
    )
    probes = [probe for probe in of_kinds if probe.examples]
    return choose_segment(core, chosen, probes, progress) if probes else ()


def _keeps(
    core: Core,
    found: Calibration,
    kinds: Sequence[str],
    effort: Effort,
    progress: ReportProgress,
) -> tuple[tuple[KeepResult, ...], float | None]:
    """How well the model answers from budgets of each size, if the context has room for probes."""
    length = min(choose_keep.PROBE_TOKENS, 3 * core.model.context_tokens // 4)
    if not effort.answers or length <= 2 * max(choose_keep.KEEPS):
        return (), None
    samples = -(-effort.answers // _QUESTIONS)
    probes = draw_probes(core.tokenizer, "confirmation", (length,), samples, effort.seed + 1)
    examples = [
        example for probe in probes for example in probe.examples if example.subtask in kinds
    ]
    if not examples:
        return (), None
    return choose_keep.choose_keep(core, found, examples[: effort.answers], progress)


def _fitting(core: Core, probes: Sequence[Probe]) -> list[Probe]:
    """The probes that a prompt has room for: facts alone may be longer than was asked for."""
    limit, windows = core.config.max_prompt_tokens, core.model.sliding_windows
    if None not in windows:  # what no layer sees tells nothing
        limit = min(limit, max(window or 0 for window in windows))
    return [probe for probe in probes if max(len(p.ids) for p in probe.prompts) <= limit]


def _deepest(num_layers: int) -> int:
    return max(1, min(num_layers - 1, round(DEEPEST * num_layers)))


def _measure_rate(
    core: Core, prompt: Prompt, layer: int, breaks: Breaks, clock: Callable[[], float]
) -> float:
    """FLOPs a second of a filter pass."""
    started_s = clock()
    evidence = next(observe(core, [prompt], [[len(prompt.ids) - 1]], layer, breaks))
    evidence.filter_layer.keys[0, -1, 0].item()  # a GPU may only have been told what to do
    seconds = clock() - started_s
    return core.model.shape.filter_chunk(0, len(prompt.ids), max(evidence.layers)) / seconds


def _prompt_times(core: Core, layer: int | None, rate: float) -> tuple[float, ...]:
    """Estimated seconds to the first token for prompts of the lengths `TIMED`.

    `layer`: where the filter pass ends, in segments; None: there is no filter. `rate`: FLOPs a
    second, as measured.
    """
    method: Literal["sieve", "none"] = "none" if layer is None else "sieve"
    return tuple(
        round(
            prompt_flops(
                core.model.shape, method, n, DEFAULT_KEEP, layer or 0, Calibration.USUAL_SEGMENT
            )
            / rate,
            2,
        )
        for n in TIMED
    )


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
    deepest: int,
    progress: ReportProgress,
    read: list[ProbeObservations],
    phase: str,
    breaks: Breaks,
) -> None:
    """Add what every head attends to in each probe, up to layer `deepest`."""
    for number, probe in enumerate(probes, start=1):
        read.append(observe_probe(core, probe, deepest, breaks))
        progress(phase, number, len(probes))


def observe_probe(
    core: Core, probe: Probe, deepest: int, breaks: Breaks = NO_PAUSES
) -> ProbeObservations:
    """What every head attends to, for all questions of a probe."""
    selector = Sieve()
    question_rows = [selector.rows(len(p.ids), p.question, False) for p in probe.prompts]
    rows = [
        [*wanted, *range(wanted[-1] + 1, len(prompt.ids))]
        for prompt, wanted in zip(probe.prompts, question_rows, strict=True)
    ]
    evidences = observe(core, probe.prompts, rows, deepest, breaks)
    observations = []
    for evidence, example, wanted in zip_longest(evidences, probe.examples, question_rows):
        kind, gold = ("none", ()) if example is None else (example.subtask, example.gold)
        observations.append(observation_of(evidence, kind, gold, len(wanted), breaks.pause))
    *facts, absent, diffuse = observations
    return ProbeObservations(facts=tuple(facts), absent=absent, diffuse=diffuse)


def _only(read: Sequence[ProbeObservations], kinds: Sequence[str]) -> list[ProbeObservations]:
    """The probes that have a question of these kinds, with those questions alone."""
    probes = (
        replace(probe, facts=tuple(fact for fact in probe.facts if fact.kind in kinds))
        for probe in read
    )
    return [probe for probe in probes if probe.facts]


def _findable(questions: Sequence[Observation], pause: Callable[[], None]) -> tuple[str, ...]:
    """The kinds of probes that some head can find. A small model may not know all of them."""
    kinds = []
    for kind in PROBE_KINDS:
        pause()
        of_kind = [question for question in questions if question.kind == kind]
        if not of_kind:
            continue
        best = max(float(single_recalls(of_kind, e).mean(dim=0).amax()) for e in (False, True))
        if best >= FINDABLE:
            kinds.append(kind)
    return tuple(kinds)


def _search(
    core: Core,
    questions: Sequence[Observation],
    length: int,
    rate: float,
    pause: Callable[[], None],
) -> list[LayerResult]:
    """The best heads and rows up to each layer. The question's rows alone, if that is as good."""
    if not questions:
        return []
    singles = {ends_with: single_recalls(questions, ends_with) for ends_with in (False, True)}
    kinds = [question.kind for question in questions]
    weights, is_by_words = balanced(kinds), torch.tensor([kind in WORD_KINDS for kind in kinds])
    shape = core.model.shape
    keep = length // 16
    whole = prompt_flops(shape, "none", length, keep, 0)

    def share(found: torch.Tensor, of: torch.Tensor) -> float | None:
        if not bool(of.any()):
            return None
        return round(float((weights * found)[of].sum() / weights[of].sum()), 4)

    layers: list[LayerResult] = []
    for position, layer in enumerate(questions[0].layers):
        pause()
        tried = {e: best_heads(questions, singles[e], layer, e) for e in (False, True)}
        recalls = {e: float(weights @ found) for e, (_, found) in tried.items()}
        ends_with = recalls[True] > recalls[False] + _ENDS_GAIN
        heads, found = tried[ends_with]
        own = torch.einsum("p,ph->h", weights, singles[ends_with][:, position])
        layers.append(
            LayerResult(
                layer=layer,
                heads=heads,
                ends_with=ends_with,
                recall=round(recalls[ends_with], 4),
                words=share(found, is_by_words),
                meaning=share(found, ~is_by_words),
                own_recall=round(float(own.amax()), 4),
                work=round(prompt_flops(shape, "sieve", length, keep, layer) / whole, 4),
                seconds=_prompt_times(core, layer, rate),
            )
        )
    return layers


def _choose(layers: Sequence[LayerResult], prefers: Preference, num_layers: int) -> LayerResult:
    """The earliest layer that finds about as much as the best one, and contributes a head.

    What counts is what it finds by meaning, or by words if speed is preferred or no head finds
    anything by meaning.
    """

    def found(row: LayerResult) -> float:
        measured = row.words if prefers == "speed" else row.meaning
        return row.recall if measured is None else measured

    low = _low(layers, num_layers)
    best = max(low, key=found)
    return next(
        row
        for row in low
        if found(row) >= found(best) - TOLERANCE
        and (row is best or any(layer == row.layer for layer, _ in row.heads))
    )


def _low(layers: Sequence[LayerResult], num_layers: int) -> Sequence[LayerResult]:
    """The layers that may be chosen."""
    return [row for row in layers if row.layer <= _deepest(num_layers)] or layers[:1]


def _by_kind(chosen: LayerResult, questions: Sequence[Observation]) -> dict[str, float]:
    """Recall of the chosen heads for each kind of question."""
    found: dict[str, list[float]] = {}
    for question in questions:
        if len(question.gold):
            recall = recall_of(chosen.heads, question, chosen.ends_with)
            found.setdefault(question.kind, []).append(recall)
    return {kind: rounded_mean(found[kind]) for kind in PROBE_KINDS if kind in found}
