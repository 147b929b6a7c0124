"""Can the engine serve this model? Makes its weights, and runs the check that loading runs."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.shared import harness, results
from gemserve.model.loading.compatibility import check_servable
from gemserve.model.passes.causal_model import CausalModel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    harness.add_shape_option(parser)
    results.add_row_options(parser)
    arguments = parser.parse_args()
    rows, made = results.Rows(arguments), []

    def make() -> dict[str, Any]:
        started_s = time.perf_counter()
        made.append(harness.random_llama(arguments.device, shape=arguments.shape))
        results.synchronize(arguments.device)
        weights = list(made[0].parameters())
        return {
            "time_s": time.perf_counter() - started_s,
            "weight_bytes": sum(weight.nbytes for weight in weights),
            "parameters": sum(weight.numel() for weight in weights),
        }

    def check() -> dict[str, Any]:
        started_s = time.perf_counter()
        check_servable(CausalModel(made[0]))
        return {"time_s": time.perf_counter() - started_s}

    if rows.attempt({"step": "make"}, make):
        rows.attempt({"step": "check"}, check)
    results.finish("model_check", arguments.device, rows, arguments.json)


if __name__ == "__main__":
    main()
