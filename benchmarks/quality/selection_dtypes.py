"""Does sieve choose the same tokens in bfloat16 as in float32, and are the answers as good?

The same weights are loaded twice. Every example is filtered and answered in both number formats.
The float32 model also answers from what bfloat16 has chosen: that shows what the choice itself
costs.

    python benchmarks/quality/selection_dtypes.py --samples 200 --tokens 1536 --keep 0.0625
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import numpy as np

from benchmarks.shared import results
from gemserve.calibration.search.calibrated_core import build_calibrated_core
from gemserve.calibration.search.example import Example, ExampleDraw, recall
from gemserve.config import EngineConfig, ModelConfig
from gemserve.contract.filter_options import FilterParams
from gemserve.engine.core import Core
from gemserve_lab.methods_compared import params_of
from gemserve_lab.metrics import score_answer
from gemserve_lab.run import generate
from gemserve_lab.tasks.needle import SUBTASKS

DTYPES = ("float32", "bfloat16")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--subtask", default="natural", choices=sorted(SUBTASKS))
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--tokens", type=int, default=1536)
    parser.add_argument("--keep", type=float, default=0.0625)
    parser.add_argument("--max-tokens", type=int, default=24)
    results.add_row_options(parser)
    arguments = parser.parse_args()
    cores = {dtype: _core(arguments, dtype) for dtype in DTYPES}
    rows = results.Rows(arguments)
    pairs: list[Pair] = []
    for index in range(arguments.samples):
        if rows.left_s <= 0:
            break
        draw = ExampleDraw(
            seed=0, num_tokens=arguments.tokens, index=index, samples=arguments.samples
        )
        example = SUBTASKS[arguments.subtask](cores["float32"].tokenizer, draw)
        example = replace(example, max_tokens=arguments.max_tokens)
        pairs.append(compare(cores, example, arguments.keep))
        results.note(f"{index + 1} of {arguments.samples}: {pairs[-1]}")
    rows.put({"tokens": arguments.tokens, "keep": arguments.keep}, summarise(pairs))
    results.finish("selection_dtypes", arguments.device, rows, arguments.json)


@dataclass(frozen=True, slots=True)
class Pair:
    """One example in both number formats.

    `overlap`: the share of float32's tokens that bfloat16 keeps, too. `recall` and `right`: for
    float32 and for bfloat16. `right_from_bfloat16`: the float32 model's answer from the tokens that
    bfloat16 has kept.
    """

    overlap: float
    recall: tuple[float, float]
    right: tuple[float, float]
    right_from_bfloat16: float


def compare(cores: dict[str, Core], example: Example, keep: float) -> Pair:
    params = params_of("sieve", keep)
    ids = example.prompt.ids
    kept: list[Sequence[tuple[int, int]]] = []
    right: list[float] = []
    for dtype in DTYPES:
        text, report = generate(cores[dtype], example, ids, params)
        assert report.applied, report
        assert report.selection is not None
        kept.append(report.selection)
        right.append(score_answer(text, example))
    chosen, other = ({p for start, stop in each for p in range(start, stop)} for each in kept)
    from_other = right[0]
    if chosen != other:
        text, _ = generate(
            cores["float32"],
            example,
            [ids[p] for p in sorted(other)],
            FilterParams(method="none", keep=16),
        )
        from_other = score_answer(text, example)
    recalls = [recall(example.gold, each) or 0.0 for each in kept]
    return Pair(
        overlap=len(chosen & other) / len(chosen),
        recall=(recalls[0], recalls[1]),
        right=(right[0], right[1]),
        right_from_bfloat16=from_other,
    )


def summarise(pairs: Sequence[Pair]) -> dict[str, Any]:
    count = len(pairs)

    def mean(values: Sequence[float]) -> float:
        return sum(values) / count

    differences = np.array([pair.right_from_bfloat16 - pair.right[0] for pair in pairs])
    rng = np.random.default_rng(0)
    low, high = np.percentile(
        [rng.choice(differences, count).mean() for _ in range(10_000)], [2.5, 97.5]
    )
    return {
        "n": count,
        "overlap": mean([pair.overlap for pair in pairs]),
        "least_overlap": min(pair.overlap for pair in pairs),
        "same_choice": mean([float(pair.overlap == 1) for pair in pairs]),
        "recall_float32": mean([pair.recall[0] for pair in pairs]),
        "recall_bfloat16": mean([pair.recall[1] for pair in pairs]),
        "right_float32": mean([pair.right[0] for pair in pairs]),
        "right_bfloat16": mean([pair.right[1] for pair in pairs]),
        "right_float32_from_bfloat16": mean([pair.right_from_bfloat16 for pair in pairs]),
        "difference": f"{differences.mean():+.3f} ({low:+.3f} to {high:+.3f})",
    }


def _core(arguments: argparse.Namespace, dtype: str) -> Core:
    return build_calibrated_core(
        ModelConfig(model=arguments.model, device=arguments.device, dtype=dtype),
        EngineConfig(kv_memory_bytes=512 << 20, filter_min_tokens=256, cache_memory=0),
    )


if __name__ == "__main__":
    main()
