"""Does a filter pass in FP8 keep what the model's own precision keeps, and is the answer as good?

Needles of every kind, one filter pass in each precision: the share of kept positions that both
have (`overlap`), in the mean and at worst, and how many answers were right from either. On a CPU
the products are emulated (FP8 factors, float32 sums), so its times say nothing; on a GPU of compute
capability 9.0 they are the hardware's, and `filter_ms` is the median.
"""

from __future__ import annotations

import argparse
from statistics import fmean, median
from typing import Any

import harness

from gemserve.config import EngineConfig, ModelConfig
from gemserve.engine.assemble import assemble, with_fp8_filter
from gemserve.engine.core import Core
from gemserve.evaluation.example import Draw, Example
from gemserve.evaluation.metrics import score_answer
from gemserve.evaluation.needle import SUBTASKS
from gemserve.evaluation.score import generate
from gemserve.model.fp8 import check_device
from gemserve.model.loader import load
from gemserve.types import Filtered, FilterMethod, FilterParams, FilterReport, Request
from gemserve.types import SamplingParams as Sampling
from gemserve_kernels.fp8 import reference_scaled_product, scaled_product

METHODS: tuple[FilterMethod, ...] = ("sieve", "gemfilter")


def with_fp8(core: Core) -> Core:
    """The same engine, filtering in FP8."""
    device = core.model.device
    if device.type == "cuda":
        check_device(device)
    product = scaled_product if device.type == "cuda" else reference_scaled_product
    model = with_fp8_filter(core.model, core.config, product)
    return Core(model, core.tokenizer, core.config, core.eos_ids)


def positions(report: FilterReport) -> set[int]:
    assert report.selection is not None
    return {p for start, stop in report.selection for p in range(start, stop)}


def row(
    name: str, method: str, length: int, pairs: list[tuple[FilterReport, FilterReport]]
) -> dict[str, Any]:
    """`pairs`: what was kept in the model's own precision, and in FP8."""
    shares = [len(positions(own) & positions(fp8)) / len(positions(own)) for own, fp8 in pairs]
    return {
        "subtask": name,
        "method": method,
        "prompt_tokens": length,
        "n": len(pairs),
        "overlap": round(fmean(shares), 4),
        "worst": round(min(shares), 4),
        "filter_ms_own": round(median(own.filter_ms for own, _ in pairs), 1),
        "filter_ms_fp8": round(median(fp8.filter_ms for _, fp8 in pairs), 1),
    }


def needles(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Of a model that answers."""
    loaded = load(ModelConfig(model=arguments.model, device=arguments.device))
    own = assemble(loaded, EngineConfig(filter_min_tokens=0))
    both = (own, with_fp8(own))
    rows: list[dict[str, Any]] = []
    for name, maker in SUBTASKS.items():
        for length in arguments.lengths:
            examples: list[Example] = [
                maker(
                    own.tokenizer,
                    Draw(seed=0, num_tokens=length, index=i, samples=arguments.samples),
                )
                for i in range(arguments.samples)
            ]
            for method in METHODS:
                params = FilterParams(method=method, keep=arguments.keep, return_selection=True)
                pairs, scores = [], []
                for example in examples:
                    harness.note(f"{name} {length} {method} {example.index}")
                    made = [generate(core, example, example.prompt.ids, params) for core in both]
                    pairs.append((made[0][1], made[1][1]))
                    scores.append([score_answer(text, example) for text, _ in made])
                rows.append(
                    row(name, method, length, pairs)
                    | {
                        "score_own": round(fmean(s[0] for s in scores), 4),
                        "score_fp8": round(fmean(s[1] for s in scores), 4),
                    }
                )
    return rows


def noise(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Random weights, random tokens: the hardest case, since nothing stands out."""
    own = harness.build_core(harness.random_llama(arguments.device), kv_memory_bytes=4 << 30)
    both = (own, with_fp8(own))
    rows = []
    for length in arguments.lengths:
        for method in METHODS:
            params = FilterParams(method=method, keep=arguments.keep, return_selection=True)
            pairs = []
            for seed in range(arguments.samples):
                harness.note(f"noise {length} {method} {seed}")
                ids = harness.random_ids(length, own.model.vocab_size, seed)
                made = [report_of(core, ids, params) for core in both]
                pairs.append((made[0], made[1]))
            rows.append(row("noise", method, length, pairs))
    return rows


def report_of(core: Core, ids: list[int], params: FilterParams) -> FilterReport:
    request = Request(
        request_id="r", prompt_ids=ids, sampling=Sampling(max_tokens=1), filter=params
    )
    (report,) = [e.report for e in core.run_alone(request) if isinstance(e, Filtered)]
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    harness.add_common(parser)
    parser.add_argument("--model", default="builtin", help="or `noise`: random weights")
    parser.add_argument("--lengths", default="1024,4096", help="default: %(default)s")
    parser.add_argument("--samples", type=int, default=20, help="default: %(default)s")
    parser.add_argument("--keep", type=float, default=0.0625, help="default: %(default)s")
    arguments = parser.parse_args()
    arguments.lengths = [int(length) for length in arguments.lengths.split(",")]
    rows = noise(arguments) if arguments.model == "noise" else needles(arguments)
    harness.finish("fp8", arguments.device, rows, arguments.json)


if __name__ == "__main__":
    main()
