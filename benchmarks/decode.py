"""Decode throughput without prefill: gemserve, `generate`, transformers' continuous batching.

The others' time for `--new-tokens` more tokens of every sequence is the difference of two runs that
differ in nothing else; contestants alternate, medians are reported.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import harness
import torch
from transformers import GenerationConfig

from gemserve.engine.core import Core
from gemserve.types import FilterParams, Request, SamplingParams

SHORT = 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", default="1,8,32", help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--skip-continuous-batching", action="store_true")
    harness.add_common(parser)
    arguments = parser.parse_args()

    model = harness.random_llama(arguments.device)
    theirs = harness.twin(model)
    core = harness.build_core(model, kv_memory_bytes=4 << 30)
    rows: list[dict[str, Any]] = []
    for count in map(int, arguments.sequences.split(",")):
        length = arguments.prompt_tokens
        prompts = [harness.random_ids(length, core.model.vocab_size, i) for i in range(count)]
        engines: dict[str, Any] = {
            "gemserve": lambda n, p=prompts: _gemserve(core, p, n),
            "generate": lambda n, p=prompts: _generate(theirs, p, n, arguments.device),
        }
        seconds: dict[str, list[float]] = {name: [] for name in engines}
        for repeat in range(arguments.repeats + 1):
            for name, run in engines.items():
                harness.note(f"{count} sequences, {name}, round {repeat}")
                taken = run(arguments.new_tokens)
                if repeat:
                    seconds[name].append(taken)
        if not arguments.skip_continuous_batching:
            harness.note(f"{count} sequences, continuous batching")
            seconds["continuous_batching"] = [
                _continuous_batching(theirs, prompts, arguments.new_tokens)
            ]
        for name, taken in seconds.items():
            rows.append(
                {
                    "engine": name,
                    "sequences": count,
                    "prompt_tokens": length,
                    "tokens_per_s": count
                    * (arguments.new_tokens - SHORT)
                    / statistics.median(taken),
                }
            )
    harness.finish("decode", arguments.device, rows, arguments.json)


def _gemserve(core: Core, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds for `new_tokens` − SHORT steps in which all sequences decode together."""
    jobs = [
        core.add(
            Request(
                request_id=str(index),
                prompt_ids=ids,
                # enough for the first to go on until the last has been read
                sampling=SamplingParams(max_tokens=4096, temperature=0.0),
                filter=FilterParams(method="none", keep=16),
            )
        )
        for index, ids in enumerate(prompts)
    ]
    while any(not job.sequence.generated for job in jobs):
        core.step()
    for _ in range(SHORT):
        core.step()
    started_s = time.perf_counter()
    for _ in range(new_tokens - SHORT):
        core.step()
    taken = time.perf_counter() - started_s
    for job in jobs:
        core.cancel(job)
    return taken


def _generate(model: Any, prompts: list[list[int]], new_tokens: int, device: str) -> float:
    """The same, of `generate`: the difference between a long and a short run."""
    tokens = torch.tensor(prompts, device=device)
    mask = torch.ones_like(tokens)

    def seconds(count: int) -> float:
        config = GenerationConfig(
            max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
        )
        started_s = time.perf_counter()
        model.generate(tokens, attention_mask=mask, generation_config=config)
        harness.synchronize(device)
        return time.perf_counter() - started_s

    short = seconds(SHORT)
    return max(1e-9, seconds(new_tokens) - short)


def _continuous_batching(model: Any, prompts: list[list[int]], new_tokens: int) -> float:
    def seconds(count: int) -> float:
        config = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1)
        started_s = time.perf_counter()
        model.generate_batch(inputs=prompts, generation_config=config, progress_bar=False)
        return time.perf_counter() - started_s

    short = seconds(SHORT)
    return max(1e-9, seconds(new_tokens) - short)


if __name__ == "__main__":
    main()
