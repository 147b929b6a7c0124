"""Decode throughput without prefill: gemserve, `generate`, transformers' continuous batching.

Every engine's steps are timed one by one while all sequences decode; contestants alternate and the
median step is reported.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import Any

import harness
import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from gemserve.engine.core import Core
from gemserve.types import FilterParams, Request, SamplingParams


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
        steps: dict[str, list[float]] = {name: [] for name in engines}
        for repeat in range(arguments.repeats):
            for name, run in engines.items():
                harness.note(f"{count} sequences, {name}, round {repeat + 1}")
                steps[name] += run(arguments.new_tokens)
        if not arguments.skip_continuous_batching:
            harness.note(f"{count} sequences, continuous batching")
            taken = _continuous_batching(theirs, prompts, arguments.new_tokens)
            steps["continuous_batching"] = [taken]
        for name, seconds in steps.items():
            rows.append(
                {
                    "engine": name,
                    "sequences": count,
                    "prompt_tokens": length,
                    "tokens_per_s": count / statistics.median(seconds),
                }
            )
    harness.finish("decode", arguments.device, rows, arguments.json)


def _gemserve(core: Core, prompts: list[list[int]], new_tokens: int) -> list[float]:
    """Seconds of each of `new_tokens` steps in which all sequences decode together."""
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
    steps: list[float] = []
    for _ in range(new_tokens):
        started_s = time.perf_counter()
        core.step()
        steps.append(time.perf_counter() - started_s)
    for job in jobs:
        core.cancel(job)
    return steps


class _Clock(StoppingCriteria):
    """Never stops anything: notes when `generate` has each token."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.times_s: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **unused: Any) -> Any:
        harness.synchronize(self._device)
        self.times_s.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _generate(model: Any, prompts: list[list[int]], new_tokens: int, device: str) -> list[float]:
    """Seconds between the tokens of `generate`; the first, which has the prefill, left out."""
    tokens = torch.tensor(prompts, device=device)
    count = new_tokens + 1
    config = GenerationConfig(
        max_new_tokens=count, min_new_tokens=count, do_sample=False, pad_token_id=0
    )
    clock = _Clock(device)
    model.generate(
        tokens,
        attention_mask=torch.ones_like(tokens),
        generation_config=config,
        stopping_criteria=StoppingCriteriaList([clock]),
    )
    return [later - earlier for earlier, later in itertools.pairwise(clock.times_s)]


def _continuous_batching(model: Any, prompts: list[list[int]], new_tokens: int) -> float:
    """Seconds a step in which all sequences decode, of transformers' continuous batching.

    Sequences read first decode while others are still read: only what lies between the last
    sequence's first token and the first sequence's last token counts.
    """
    count = new_tokens + len(prompts) + 1
    config = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1)
    results = model.generate_batch(
        inputs=prompts, generation_config=config, record_timestamps=True, progress_bar=False
    )
    times_s = [result.timestamps for result in results.values()]
    start_s, stop_s = max(t[0] for t in times_s), min(t[-1] for t in times_s)
    drawn = sum(start_s < at <= stop_s for t in times_s for at in t)
    return (stop_s - start_s) * len(prompts) / drawn


if __name__ == "__main__":
    main()
