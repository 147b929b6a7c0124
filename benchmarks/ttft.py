"""Time to first token: each filter method against reading everything, and that against SDPA.

`bound` is FLOPs(none) / FLOPs(method), second pass included; `fraction_of_bound` how much of it
was reached. transformers' own SDPA prefill of the same weights runs beside, so that a slow `none`
cannot flatter the rest.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import harness
import torch

from gemserve.cli.options import read_bytes
from gemserve.engine.core import Core
from gemserve.types import FilterMethod, FilterParams, Request, SamplingParams

SDPA = "transformers_sdpa"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--lengths", default="4096,16384,32768", help="default: %(default)s")
    parser.add_argument("--methods", default="none,gemfilter,sieve", help="default: %(default)s")
    parser.add_argument("--keep", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--kv-memory", type=read_bytes, default="8GiB", help="default: %(default)s")
    harness.add_common(parser)
    arguments = parser.parse_args()
    methods: list[FilterMethod] = arguments.methods.split(",")
    if "none" not in methods:
        methods.insert(0, "none")

    model = harness.random_llama(arguments.device)
    theirs = harness.twin(model)
    core = harness.build_core(model, kv_memory_bytes=arguments.kv_memory)
    warm_up = harness.random_ids(2048, core.model.vocab_size, seed=0)
    _sdpa(theirs, warm_up, arguments.device)
    for method in methods:
        _ours(core, warm_up, method, 256)
    rows: list[dict[str, Any]] = []
    for length in map(int, arguments.lengths.split(",")):
        ids = harness.random_ids(length, core.model.vocab_size, seed=length)
        seconds: dict[str, list[float]] = {name: [] for name in (SDPA, *methods)}
        peaks: dict[str, int] = {}
        for repeat in range(arguments.repeats):
            harness.note(f"{length} tokens, round {repeat + 1} of {arguments.repeats}")
            seconds[SDPA].append(_sdpa(theirs, ids, arguments.device))
            for method in methods:
                took, peaks[method] = _ours(core, ids, method, arguments.keep)
                seconds[method].append(took)
        none_s = statistics.median(seconds["none"])
        for name, taken in seconds.items():
            ttft_s = statistics.median(taken)
            bound = None if name == SDPA else _bound(core, name, length, arguments.keep)
            rows.append(
                {
                    "method": name,
                    "prompt_tokens": length,
                    "ttft_s": ttft_s,
                    "ratio_to_none": none_s / ttft_s,
                    "bound": bound,
                    "fraction_of_bound": None if bound is None else none_s / ttft_s / bound,
                    "peak_kv_bytes": peaks.get(name),
                }
            )
    harness.finish("ttft", arguments.device, rows, arguments.json)


def _bound(core: Core, method: Any, length: int, keep: int) -> float:
    shape, layer = core.model.shape, harness.FILTER_LAYER
    full = shape.prompt_flops("none", length, keep, layer)
    return full / shape.prompt_flops(method, length, keep, layer)


def _ours(core: Core, ids: list[int], method: FilterMethod, keep: int) -> tuple[float, int]:
    """Seconds to the first token, and the largest KV memory seen between steps."""
    request = Request(
        request_id="ttft",
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=1, temperature=0.0),
        filter=FilterParams(method=method, keep=keep),
    )
    started_s = time.perf_counter()
    core.add(request)
    peak = 0
    while not core.is_idle:
        core.step()
        peak = max(peak, core.kv_bytes_used)
    return time.perf_counter() - started_s, peak


@torch.inference_mode()
def _sdpa(model: Any, ids: list[int], device: str) -> float:
    tokens = torch.tensor([ids], device=device)
    started_s = time.perf_counter()
    model(input_ids=tokens, use_cache=True, logits_to_keep=1)
    harness.synchronize(device)
    return time.perf_counter() - started_s


if __name__ == "__main__":
    main()
