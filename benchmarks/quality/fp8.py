"""Does a filter pass in FP8 keep what the model's own precision keeps, with answers as good?

`overlap` is the share of positions kept in the model's own precision that FP8 keeps too, on average
and at worst. Beside it are the share of right answers (`score`) and of needed tokens kept
(`recall`), each also in the model's own precision. The prompts are needles of every kind.

On a CPU the own precision is float32, and bfloat16 is compared too, because any rounding changes
the order of near equals. FP8 products are emulated there, so times say nothing. On a GPU of compute
capability 9.0 the hardware computes them.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import torch

from benchmarks.shared import harness, results
from gemserve.calibration.search.example import Example, ExampleDraw, recall
from gemserve.config import EngineConfig, ModelConfig
from gemserve.contract.events import Filtered
from gemserve.contract.filter_options import FilterMethod, FilterParams
from gemserve.contract.reports import FilterReport
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.build import assemble, with_fp8_filter
from gemserve.engine.core import Core
from gemserve.model.loading.loader import load
from gemserve.model.passes.fp8 import check_device
from gemserve_kernels.fp8 import reference_scaled_product, scaled_product
from gemserve_lab.metrics import score_answer
from gemserve_lab.run import generate
from gemserve_lab.tasks.needle import SUBTASKS

METHODS: tuple[FilterMethod, ...] = ("sieve", "gemfilter")


@dataclass(frozen=True)
class Result:
    """One example in one precision."""

    report: FilterReport
    score: float | None = None
    recall: float | None = None


def with_fp8(core: Core) -> Core:
    """The same engine with FP8 filter passes."""
    device = core.model.device
    if device.type == "cuda":
        check_device(device)
    product = scaled_product if device.type == "cuda" else reference_scaled_product
    model = with_fp8_filter(core.model, core.config, product)
    return Core(model, core.tokenizer, core.config, core.eos_ids)


def positions(report: FilterReport) -> set[int]:
    assert report.selection is not None
    return {p for start, stop in report.selection for p in range(start, stop)}


def rows_of(about: dict[str, Any], found: dict[str, list[Result]]) -> list[dict[str, Any]]:
    """One row for each precision other than the model's own, which is called "own"."""
    own = found["own"]
    rows: list[dict[str, Any]] = []
    for precision, others in found.items():
        if precision == "own":
            continue
        pairs = [
            (positions(a.report), positions(b.report)) for a, b in zip(own, others, strict=True)
        ]
        shares = [len(a & b) / len(a) for a, b in pairs]
        rows.append(
            about
            | {
                "precision": precision,
                "n": len(shares),
                "overlap": round(fmean(shares), 4),
                "worst": round(min(shares), 4),
                "score": _mean([r.score for r in others]),
                "score_own": _mean([r.score for r in own]),
                "recall": _mean([r.recall for r in others]),
                "recall_own": _mean([r.recall for r in own]),
                "filter_ms": round(median(r.report.filter_ms for r in others), 1),
                "filter_ms_own": round(median(r.report.filter_ms for r in own), 1),
            }
        )
    return rows


def _mean(values: list[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return round(fmean(known), 4) if known else None


def needles(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Overlap, score and recall for a model that answers."""
    settings = EngineConfig(filter_min_tokens=0)
    own = assemble(load(ModelConfig(model=arguments.model, device=arguments.device)), settings)
    cores = {"own": own, "fp8": with_fp8(own)}
    if own.model.dtype == torch.float32:
        half = ModelConfig(model=arguments.model, device=arguments.device, dtype="bfloat16")
        cores["bfloat16"] = assemble(load(half), settings)
    rows: list[dict[str, Any]] = []
    for length in arguments.lengths:
        for name, maker in SUBTASKS.items():
            for method in METHODS:
                params = FilterParams(method=method, keep=arguments.keep, return_selection=True)
                found: dict[str, list[Result]] = {precision: [] for precision in cores}
                for index in range(arguments.samples):
                    results.note(f"{length} {name} {method} {index}")
                    draw = ExampleDraw(
                        seed=arguments.seed,
                        num_tokens=length,
                        index=index,
                        samples=arguments.samples,
                    )
                    example = maker(own.tokenizer, draw)
                    for precision, core in cores.items():
                        found[precision].append(answer(core, example, params))
                about = {"subtask": name, "method": method, "prompt_tokens": length}
                rows += rows_of(about, found)
    return rows


def answer(core: Core, example: Example, params: FilterParams) -> Result:
    text, report = generate(core, example, example.prompt.ids, params)
    assert report.selection is not None
    return Result(report, score_answer(text, example), recall(example.gold, report.selection))


def noise(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Overlap for random weights and tokens. Nothing stands out, so all scores are near equals."""
    weights = harness.random_llama(arguments.device)
    own = harness.build_core(weights, kv_memory_bytes=1 << 30)
    cores = {"own": own, "fp8": with_fp8(own)}
    if own.model.dtype == torch.float32:
        half = harness.random_llama(arguments.device).to(torch.bfloat16)
        cores["bfloat16"] = harness.build_core(half, kv_memory_bytes=1 << 30)
    rows: list[dict[str, Any]] = []
    for length in arguments.lengths:
        for method in METHODS:
            params = FilterParams(method=method, keep=arguments.keep, return_selection=True)
            found: dict[str, list[Result]] = {precision: [] for precision in cores}
            for index in range(arguments.samples):
                results.note(f"{length} noise {method} {index}")
                ids = harness.random_ids(length, own.model.vocab_size, arguments.seed + index)
                for precision, core in cores.items():
                    found[precision].append(Result(report_of(core, ids, params)))
            rows += rows_of({"subtask": "noise", "method": method, "prompt_tokens": length}, found)
    return rows


def report_of(core: Core, ids: list[int], params: FilterParams) -> FilterReport:
    request = Request(
        request_id="r", prompt_ids=ids, sampling=SamplingParams(max_tokens=1), filter=params
    )
    (report,) = [e.report for e in core.run_alone(request) if isinstance(e, Filtered)]
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    results.add_common(parser)
    parser.add_argument("--model", default="builtin", help="or `noise`: random weights")
    parser.add_argument("--lengths", default="1024,4096", help="default: %(default)s")
    parser.add_argument("--samples", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--keep", type=float, default=0.0625, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    arguments = parser.parse_args()
    arguments.lengths = [int(length) for length in arguments.lengths.split(",")]
    rows = noise(arguments) if arguments.model == "noise" else needles(arguments)
    results.finish("fp8", arguments.device, rows, arguments.json)


if __name__ == "__main__":
    main()
