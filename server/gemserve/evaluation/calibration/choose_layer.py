"""Which layer and heads of a model find what is asked for, measured on probes.

Every probe is read once, and every head of every layer is scored by what it would keep. The layer
is the earliest one up to which some heads find as much as any do; probes of other wording, names
and numbers then confirm it by the model's answers, and give the bound below which a choice is not
trusted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from gemserve.engine.core import Core
from gemserve.errors import ConfigError
from gemserve.evaluation.answers import answer_all
from gemserve.evaluation.calibration.head_search import (
    SHARES,
    Observation,
    best_heads,
    coverage,
    recall_of,
    single_recalls,
    watch,
)
from gemserve.evaluation.calibration.observe import observe
from gemserve.evaluation.calibration.probes import PROBE_KINDS, Probe, draw_probes
from gemserve.evaluation.calibration.result import Found, LayerResult, Trust
from gemserve.evaluation.metrics import score_answer
from gemserve.filtering.sieve import Sieve

# A layer this close to the best, or by one probe, is as good; the earliest is the fastest.
TOLERANCE = 0.02
# A kind of probe of which no head finds this much says nothing about this model.
FINDABLE = 0.5
# Nothing is trusted that does not find this much of the kinds that can be found.
LEAST_RECALL = 0.7
CANDIDATES = 3
# The bound may call so many of the found ones untrusted. It is lowered a little, because attention
# is spread thinner over documents that are longer than the probes.
_FALSE_ALARMS = 0.05
_MARGIN = 0.9
_ANSWER_TOKENS = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class Effort:
    """How much a calibration reads: lengths of its probes, and how many of each kind.

    `confirms`: probes of each kind that confirm the best layers by answers; 0: by recall alone.
    """

    lengths: tuple[int, ...] = (1024, 2048)
    samples: int = 3
    confirms: int = 2
    seed: int = 0


SHORT = Effort(lengths=(1024,), samples=2, confirms=0)
Progress = Callable[[str], None]


def calibrate(core: Core, effort: Effort, progress: Progress) -> Found:
    """Choose layer, heads and rows, and the bound of coverage.

    `progress` is told of every probe that was read. An interrupt (Ctrl-C) ends the reading: once
    every kind of probe was read, the choice is made from those. Raises `ConfigError` where probes
    do not tell the layers apart.
    """
    lengths, samples = effort.lengths, effort.samples
    probes = draw_probes(core.tokenizer, "calibration", lengths, samples, effort.seed)
    seen, is_interrupted = _observe_all(core, probes, progress)
    kinds = _findable(seen)
    # a probe of which all that is needed is protected says nothing
    seen = [triple for triple in seen if triple[0].kind in kinds and len(triple[0].gold)]
    asked = [asked for asked, _, _ in seen]
    layers = _search(core, asked, lengths)
    check_found(layers, len(asked))
    candidates = _candidates(layers, len(asked))
    others: list[Probe] = []
    if not is_interrupted:
        count = effort.confirms or 1
        others = draw_probes(core.tokenizer, "confirmation", lengths[:1], count, effort.seed)
        others = [probe for probe in others if probe.kind in kinds]
    other_seen, _ = _observe_all(core, others, progress)
    pairs = [pair for pair in zip(others, other_seen, strict=False) if len(pair[1][0].gold)]
    others, other_seen = [probe for probe, _ in pairs], [triple for _, triple in pairs]
    full_score = None
    if effort.confirms and others:
        candidates, full_score = _confirm(core, candidates, others, other_seen)
    chosen = _earliest(candidates, max(1, len(others)))
    known = {row.layer: row for row in candidates}
    confirmed = [recall_of(chosen.heads, a, chosen.ends_with) for a, _, _ in other_seen]
    return Found(
        layers=tuple(known.get(row.layer, row) for row in layers),
        chosen=chosen,
        trust=_trust(chosen, seen, other_seen),
        kinds=kinds,
        num_probes=len(asked),
        full_score=full_score,
        confirmed_recall=_mean(confirmed) if confirmed else None,
    )


def check_found(layers: Sequence[LayerResult], num_probes: int) -> None:
    """Raise `ConfigError` if the probes do not tell layers apart."""
    advice = "nothing was written; other lengths or more samples may tell"
    if num_probes == 0 or not layers:
        raise ConfigError(f"no head of this model finds any kind of probe: {advice}")
    best = max(row.recall for row in layers)
    if best < LEAST_RECALL:
        raise ConfigError(
            f"the best heads find {best:.2f} of what is asked for, less than {LEAST_RECALL}: "
            f"{advice}"
        )
    own = [row.own_recall for row in layers]
    if len(own) > 1 and max(own) == min(own):
        raise ConfigError(f"all layers do equally well, {max(own):.2f}: {advice}")


Triple = tuple[Observation, Observation, Observation]  # of one probe's three questions


def _observe_all(
    core: Core, probes: Sequence[Probe], progress: Progress
) -> tuple[list[Triple], bool]:
    """What every head looks at in each probe, and whether the reading was interrupted."""
    seen: list[Triple] = []
    try:
        for probe in probes:
            seen.append(_observe(core, probe))
            progress(f"{probe.kind} probe of {len(probe.example.prompt.ids)} tokens")
    except KeyboardInterrupt:
        if len({asked.kind for asked, _, _ in seen}) < len(PROBE_KINDS):
            raise
        return seen, True
    return seen, False


def _observe(core: Core, probe: Probe) -> Triple:
    """What every head looks at, for the three questions of a probe."""
    selector = Sieve()
    questions = [len(selector.rows(len(p.ids), p.question, False)) for p in probe.prompts]
    rows = []
    for prompt in probe.prompts:
        asked = selector.rows(len(prompt.ids), prompt.question, False)
        rows.append([*asked, *range(asked[-1] + 1, len(prompt.ids))])
    golds = (probe.example.gold, (), ())
    seen = []
    for evidence, gold, count in zip(
        observe(core, probe.prompts, rows), golds, questions, strict=True
    ):
        seen.append(watch(evidence, probe.kind, gold, count))
    asked_for, absent, diffuse = seen
    return asked_for, absent, diffuse


def _findable(seen: Sequence[Triple]) -> tuple[str, ...]:
    """The kinds of probes that some head finds: a small model may not know all of them."""
    found = []
    for kind in dict.fromkeys(asked.kind for asked, _, _ in seen):
        own = [asked for asked, _, _ in seen if asked.kind == kind and len(asked.gold)]
        if not own:
            continue
        best = max(float(single_recalls(own, e).mean(dim=0).amax()) for e in (False, True))
        if best >= FINDABLE:
            found.append(kind)
    return tuple(found)


def _search(core: Core, asked: Sequence[Observation], lengths: Sequence[int]) -> list[LayerResult]:
    """The best heads and rows up to each layer. Where rows do as well, the question's alone."""
    if not asked:
        return []
    singles = {ends_with: single_recalls(asked, ends_with) for ends_with in (False, True)}
    shape, length = core.model.shape, max(lengths)
    keep = length // 16
    whole = shape.prompt_flops("none", length, keep, 0)
    layers: list[LayerResult] = []
    for position, layer in enumerate(asked[0].layers):
        tried = {e: best_heads(asked, singles[e], layer, e) for e in (False, True)}
        ends_with = tried[True][1] > tried[False][1] + TOLERANCE
        heads, recall = tried[ends_with]
        layers.append(
            LayerResult(
                layer=layer,
                heads=heads,
                ends_with=ends_with,
                recall=round(recall, 4),
                own_recall=round(float(singles[ends_with].mean(dim=0)[position].amax()), 4),
                work=round(shape.prompt_flops("sieve", length, keep, layer) / whole, 4),
            )
        )
    return layers


def _candidates(layers: Sequence[LayerResult], num_probes: int) -> list[LayerResult]:
    """The earliest layers that are about as good as the best, and bring a head of their own."""
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
    seen: Sequence[Triple],
) -> tuple[list[LayerResult], float]:
    """The candidates with their scores: answers from what each keeps of probes of other wording.

    And the score of answers from the whole prompts.
    """
    examples = [probe.example for probe in probes]
    tries = [
        [_kept_ids(probe, asked, row) for probe, (asked, _, _) in zip(probes, seen, strict=True)]
        for row in candidates
    ]
    tries.append([list(example.prompt.ids) for example in examples])
    texts = answer_all(core, [ids for tried in tries for ids in tried], _ANSWER_TOKENS)
    scores = []
    for start in range(0, len(texts), len(examples)):
        own = texts[start : start + len(examples)]
        scores.append(_mean([score_answer(t, e) for t, e in zip(own, examples, strict=True)]))
    pairs = zip(candidates, scores[:-1], strict=True)
    confirmed = [replace(row, score=score) for row, score in pairs]
    return confirmed, scores[-1]


def _kept_ids(probe: Probe, asked: Observation, row: LayerResult) -> list[int]:
    """The tokens of a probe that these heads keep at a sixteenth, with all that is protected."""
    prompt, document = probe.example.prompt, set(asked.document.tolist())
    scores = torch.zeros(len(prompt.ids))
    scores[asked.document] = asked.of(row.heads, row.ends_with)
    count = max(1, round(SHARES[0] * len(document)))
    order, _ = Sieve().order(scores, prompt.breaks, count)
    chosen = set([p for p in order.tolist() if p in document][:count])
    ids = prompt.ids
    return [token for p, token in enumerate(ids) if p in chosen or p not in document]


def _earliest(candidates: Sequence[LayerResult], num_probes: int) -> LayerResult:
    """The earliest candidate whose answers are not clearly worse than the best one's.

    Within one and a half standard errors of a paired difference, if a quarter of the pairs differ.
    """
    scores = [row.score for row in candidates if row.score is not None]
    if not scores or max(scores) == 0:
        return candidates[0]
    least = max(scores) - 1.5 * (0.25 / num_probes) ** 0.5
    return next(row for row in candidates if row.score is not None and row.score >= least)


def _trust(row: LayerResult, seen: Sequence[Triple], others: Sequence[Triple]) -> Trust:
    """Set the bound on some probes and judge it on others."""

    def coverages(triples: Sequence[Triple], which: int) -> list[float]:
        return [coverage(row.heads, t[which], row.ends_with) for t in triples]

    def found(triples: Sequence[Triple]) -> list[Triple]:
        return [t for t in triples if recall_of(row.heads, t[0], row.ends_with) >= 0.8]

    good = coverages(found(seen), 0)
    bad = [*coverages(seen, 1), *coverages(seen, 2)]
    bound = round(_MARGIN * choose_bound(good, bad), 4)
    judged = found(others)
    return Trust(
        bound=bound,
        found=_mean([float(c < bound) for c in coverages(judged, 0)]),
        absent=_mean([float(c < bound) for c in coverages(others, 1)]),
        diffuse=_mean([float(c < bound) for c in coverages(others, 2)]),
    )


def choose_bound(good: Sequence[float], bad: Sequence[float]) -> float:
    """The bound that tells bad choices from good ones best, among those with few false alarms."""
    most = _FALSE_ALARMS * len(good)
    allowed = [b for b in (0.0, *sorted(good), *sorted(bad)) if sum(g < b for g in good) <= most]

    def gain(bound: float) -> float:
        missed = sum(b < bound for b in bad) / max(1, len(bad))
        return missed - sum(g < bound for g in good) / max(1, len(good))

    best: float = max(allowed, key=gain)
    return round(best, 4)


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4) if values else 0.0
