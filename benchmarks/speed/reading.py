"""How long a prompt is read before its first token, by attention kernel, dtype and filter.

Natural needles; each prompt is a document of its own. All ways take turns, prompt by prompt, in one
process; the best of `--repeats` is reported, by the clock and as processor time of all threads.

    python benchmarks/speed/reading.py --ways native-cpu:bfloat16,aten-cpu:bfloat16,aten-cpu:float32
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.peers import Prompts
from benchmarks.shared import results
from gemserve.config import EngineConfig, ModelConfig
from gemserve.llm import LLM, FilterOptions

_MODEL = "smollm2"
_METHODS = ("none", "sieve")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ways", default="native-cpu:bfloat16,aten-cpu:bfloat16")
    parser.add_argument("--lengths", type=results.numbers, default=[1024, 4096, 6000])
    results.add_common(parser)
    arguments = parser.parse_args()
    engine = EngineConfig(cache_memory=0, filter_min_tokens=512)
    models = {}
    for way in arguments.ways.split(","):
        backend, _, dtype = way.partition(":")
        config = ModelConfig(
            model=_MODEL, device="cpu", dtype=dtype or "auto", attention_backend=backend
        )
        models[way] = LLM(config, engine)
    prompts, rows = Prompts(_MODEL), []
    for length in arguments.lengths:
        taken: dict[tuple[str, str], list[tuple[float, float]]] = {}
        for turn in range(arguments.repeats + 1):  # the first one warms up
            text = prompts.make(length, turn)
            for way, model in models.items():
                for method in _METHODS:
                    found = _read(model, text, method)
                    if turn:
                        taken.setdefault((way, method), []).append(found)
        rows += [_row(length, *key, times) for key, times in taken.items()]
    results.finish("reading", "cpu", rows, arguments.json)


def _read(model: LLM, text: str, method: str) -> tuple[float, float]:
    started_s, used_s = time.perf_counter(), time.process_time()
    model.generate(text, max_tokens=1, filter=FilterOptions(method=method))
    return time.perf_counter() - started_s, time.process_time() - used_s


def _row(length: int, way: str, method: str, times: list[tuple[float, float]]) -> dict[str, Any]:
    clock, processor = (min(column) for column in zip(*times, strict=True))
    return {
        "tokens": length,
        "way": way,
        "filter": method,
        "first_token_s": clock,
        "processor_s": processor,
    }


if __name__ == "__main__":
    main()
