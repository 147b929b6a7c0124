"""Which layer should filter: every layer chooses on probes, and the model answers from its choice.

One reading of a probe shows what each layer would keep; the answers from what it kept are short
passes. So all layers together cost a few readings, not one each.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gemserve.engine.core import Core
from gemserve.errors import ConfigError
from gemserve.evaluation.example import Draw, Example, Maker
from gemserve.evaluation.metrics import METRICS
from gemserve.evaluation.observe import observe
from gemserve.evaluation.score import generate, recall
from gemserve.filtering.table import SELECTORS
from gemserve.types import Budget, FilterParams

# A layer this close to the best, or by one probe, is as good; the earliest is the fastest.
TOLERANCE = 0.01
# Below this share of right answers a model cannot be judged by them, only by what was kept.
ANSWERING = 0.2


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResult:
    """One layer as the filter layer, averaged over the probes.

    `score`: right answers from what it kept; `recall`: share of the needed tokens kept; `distance`:
    tokens from a needed one to the nearest kept; `work`: floating-point operations up to the first
    token, as a share of reading everything.
    """

    layer: int
    score: float
    recall: float
    distance: float
    work: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """`layers`: those that see every probe whole; `full_score`: answers from the whole prompt."""

    filter_layer: int
    full_score: float
    num_probes: int
    layers: tuple[LayerResult, ...]


def calibrate(
    core: Core,
    makers: Sequence[Maker],
    draws: Sequence[Draw],
    keep: int | float,
    progress: Callable[[], None],
) -> Calibration:
    """Try every layer with sieve on one probe for each maker and draw."""
    full: list[float] = []
    tried: dict[int, list[tuple[float, float, float, float]]] = {}
    for maker in makers:
        for draw in draws:
            example = maker(core.tokenizer, draw)
            full.append(_score(core, example, example.prompt.ids))
            for layer, result in _try_layers(core, example, keep).items():
                tried.setdefault(layer, []).append(result)
            progress()
    layers = [
        LayerResult(
            layer=layer,
            score=_mean([r[0] for r in results]),
            recall=_mean([r[1] for r in results]),
            distance=_mean([r[2] for r in results]),
            work=_mean([r[3] for r in results]),
        )
        for layer, results in tried.items()
        if len(results) == len(full)
    ]
    return Calibration(
        filter_layer=choose_layer(layers, max(TOLERANCE, 1.5 / len(full))),
        full_score=_mean(full),
        num_probes=len(full),
        layers=tuple(layers),
    )


def choose_layer(layers: Sequence[LayerResult], tolerance: float) -> int:
    """The earliest layer about as good as the best: by answers, or by recall if there are none."""
    values = _worth(layers)
    best = max(values.values())
    return min(layer for layer, value in values.items() if value >= best - tolerance)


def check_found(found: Calibration) -> None:
    """Raise `ConfigError` if the probes do not tell layers apart."""
    advice = "nothing was written; other lengths, more samples or a larger keep may tell"
    best = max(row.score for row in found.layers)
    if best < ANSWERING <= found.full_score:
        raise ConfigError(
            f"whole probes score {found.full_score:.2f}, but no layer's choice more than "
            f"{best:.2f}: {advice}"
        )
    values = _worth(found.layers).values()
    if len(values) > 1 and max(values) == min(values):
        raise ConfigError(f"all layers do equally well, {max(values):.2f}: {advice}")


def _worth(layers: Sequence[LayerResult]) -> dict[int, float]:
    is_answering = max(r.score for r in layers) >= ANSWERING
    return {r.layer: r.score if is_answering else r.recall for r in layers}


def _try_layers(
    core: Core, example: Example, keep: int | float
) -> dict[int, tuple[float, float, float, float]]:
    """Score, recall, distance and work of each layer on one probe."""
    ids, num_tokens = example.prompt.ids, len(example.prompt.ids)
    params = FilterParams(method="sieve", keep=keep)
    count = min(num_tokens - 1, params.kept_count(num_tokens))
    budget = Budget(low=count, high=count, limit=count)
    selector, shape = SELECTORS["sieve"], core.model.shape
    whole = shape.prompt_flops("none", num_tokens, count, 0)
    gold = [p for start, stop in example.gold for p in range(start, stop)]
    results: dict[int, tuple[float, float, float, float]] = {}
    observed = observe(core, example.prompt, selector.window(num_tokens))
    for layer, evidence in observed.items():
        kept = selector.choose(evidence, budget, params).positions.tolist()
        found = recall(example.gold, [(p, p + 1) for p in kept])
        results[layer] = (
            _score(core, example, [ids[p] for p in kept]),
            1.0 if found is None else found,
            _mean([_distance(p, kept) for p in gold]) if gold else 0.0,
            shape.prompt_flops("sieve", num_tokens, count, layer) / whole,
        )
    return results


def _score(core: Core, example: Example, ids: Sequence[int]) -> float:
    text, _ = generate(core, example, ids, FilterParams(method="none", keep=16))
    return METRICS[example.metric](text, example)


def _distance(position: int, kept: Sequence[int]) -> float:
    """To the nearest of ascending positions."""
    after = bisect_left(kept, position)
    return min(abs(position - p) for p in kept[max(0, after - 1) : after + 1])


def _mean(values: Sequence[float]) -> float:
    return round(sum(values) / len(values), 4)
