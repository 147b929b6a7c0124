"""Chooses how long the segments are in which a model reads documents, or that it reads none.

Probes of several segments' length are filtered by the engine itself: in one pass, and in segments
of each size. The size with the least work is chosen among those that find as much as the best. If
one pass finds more than any segments, there are none.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import count

from gemserve.calibration.files import Calibration
from gemserve.calibration.search.example import recall
from gemserve.calibration.search.probes import Probe
from gemserve.calibration.search.result import LayerResult, SegmentResult, rounded_mean
from gemserve.contract.events import Filtered
from gemserve.contract.filter_options import FilterParams, SegmentSize
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.cost import ModelShape
from gemserve.engine.core import Core
from gemserve.prompting.prompt import Prompt

SIZES = (1024, 1536, 2048, 4096)
PROBE_TOKENS = 6144  # of a document, if the model's context has room for it
_SHARE = 1 / 32  # of a document that is kept


def choose_segment(
    core: Core,
    chosen: LayerResult,
    probes: Sequence[Probe],
    progress: Callable[[str, int, int], None],
) -> tuple[SegmentResult, ...]:
    """Filter the probes in one pass and in segments; the result that is chosen comes first.

    `chosen`: the layer and the heads that filter. `probes`: documents of the same length.
    """
    planner = core.planner
    calibration = Calibration(
        layer=chosen.layer, heads=chosen.heads, ends_with=chosen.ends_with, is_measured=True
    )
    core.planner = replace(planner, calibration=calibration, longest_pass=1 << 30, min_tokens=0)
    longest = max(len(prompt.ids) for probe in probes for prompt in probe.prompts)
    sizes = [None, *(size for size in SIZES if size < longest)]
    done = count(1)

    def one_more() -> None:
        progress("windows", next(done), len(sizes) * len(probes))

    try:
        rows = [_measure(core, probes, size, one_more) for size in sizes]
    finally:
        core.planner = planner
    most = max(row.recall for row in rows)
    tolerance = max(0.02, 1 / sum(len(probe.examples) for probe in probes))
    good = [row for row in rows if row.recall >= most - tolerance]
    best = min(good, key=lambda row: row.work)
    return best, *(row for row in rows if row is not best)


def _measure(
    core: Core, probes: Sequence[Probe], size: int | None, progress: Callable[[], None]
) -> SegmentResult:
    recalls: list[float] = []
    for probe in probes:
        prompts = [example.prompt for example in probe.examples]
        for example, report in zip(probe.examples, _reports(core, prompts, size), strict=True):
            recalls.append(recall(example.gold, report.selection or ()) or 0.0)
        progress()
    return SegmentResult(
        window=size,
        recall=rounded_mean(recalls),
        work=_work(core.model.shape, core.planner.calibration.layer, size),
    )


def _reports(core: Core, prompts: Sequence[Prompt], size: int | None) -> Iterator[FilterReport]:
    segment_size: SegmentSize = "off" if size is None else size
    for prompt in prompts:
        params = FilterParams(
            method="sieve", keep=_SHARE, window=segment_size, return_selection=True
        )
        request = Request(
            request_id=uuid.uuid4().hex,
            **prompt.fields,
            sampling=SamplingParams(max_tokens=1),
            filter=params,
            selects_only=True,
        )
        events = list(core.run_alone(request))
        (report,) = (event.report for event in events if isinstance(event, Filtered))
        yield report


def _work(shape: ModelShape, layer: int, size: int | None, num_tokens: int = 1 << 15) -> float:
    """FLOPs of the filter pass over a long prompt, as a share of reading it whole."""
    length = num_tokens if size is None else size
    filtered = num_tokens / length * shape.filter_chunk(0, length, layer)
    beside = 0 if size is None else 64  # an anchor and a question
    filtered *= 1 + beside / length
    return round(filtered / shape.prefill_chunk(0, num_tokens), 4)
