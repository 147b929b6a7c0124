"""Decode throughput without prefill: gemserve, `generate`, transformers' continuous batching.

Every engine's steps are timed one by one while all sequences decode; contestants alternate and the
median step is reported.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository root

import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from benchmarks.shared import harness, results
from gemserve.contract.events import Finished
from gemserve.engine.core import Core
from gemserve.model.passes.causal_model import CausalModel

ENGINES = ("gemserve", "generate", "continuous_batching")
_WARM_UP_STEPS = 3
_ROOM_TOKENS = 4096  # for the first sequence to go on until the last one has been read


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sequences", default="1,8,32", help="default: %(default)s")
    parser.add_argument("--prompt-tokens", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--new-tokens", type=int, default=16, help="default: %(default)s")
    parser.add_argument("--engines", default=",".join(ENGINES), help="default: %(default)s")
    parser.add_argument("--skip-continuous-batching", action="store_true")
    harness.add_shape_option(parser)
    harness.add_dtype_option(parser)
    harness.add_variants_option(parser)
    results.add_row_options(parser)
    arguments = parser.parse_args()
    if arguments.skip_continuous_batching:
        arguments.engines = arguments.engines.replace("continuous_batching", "")
    rows = results.Rows(arguments)
    model = harness.random_llama(arguments.device, shape=arguments.shape, dtype=arguments.dtype)
    theirs = harness.twin(model)
    for count in results.numbers(arguments.sequences):
        length, vocab_size = arguments.prompt_tokens, model.config.vocab_size
        prompts = [harness.random_ids(length, vocab_size, i) for i in range(count)]
        _contest(arguments, rows, model, theirs, prompts)
    results.finish("decode", arguments.device, rows, arguments.json)


def _contest(
    arguments: argparse.Namespace,
    rows: results.Rows,
    model: Any,
    theirs: Any,
    prompts: list[list[int]],
) -> None:
    """Measure every engine with these prompts. They take turns."""
    length, device = arguments.prompt_tokens, arguments.device
    engines = [("gemserve", name) for name in arguments.variants.split(",")]
    engines += [(name, None) for name in ENGINES[1:]]
    contestants: list[tuple[dict[str, Any], Any]] = []
    for engine, variant in engines:
        labels: dict[str, Any] = {"engine": engine, "sequences": len(prompts)}
        labels["prompt_tokens"] = length
        if engine not in arguments.engines.split(","):
            continue
        if variant is None:
            run = _generate if engine == "generate" else _continuous_batching
            contestants.append((labels, partial(run, theirs, prompts, arguments.new_tokens)))
            continue
        obstacle = harness.VARIANTS[variant].find_obstacle(device)
        if obstacle is not None:
            rows.put(labels | {"variant": variant}, {"reason": obstacle})
            continue
        contestants.append((labels, Gemserve(arguments, model, variant, prompts, labels)))
    steps: list[list[float]] = [[] for _ in contestants]
    failed: set[int] = set()
    for _ in range(arguments.repeats):
        for index, (labels, run) in enumerate(contestants):
            done = labels["engine"] == "continuous_batching" and steps[index]
            if index in failed or done or (steps[index] and rows.left_s <= 0):
                continue

            def measure(index: int = index, run: Any = run) -> dict[str, Any]:
                steps[index] += run()
                step_s = statistics.median(steps[index])
                found = {"tokens_per_s": len(prompts) / step_s, "step_s": step_s}
                read = getattr(run, "read_bytes", None)
                return found | ({} if read is None else {"read_bytes": read})

            if not rows.attempt(labels, measure):
                failed.add(index)
            results.free(device)


class Gemserve:
    """Times gemserve's decode steps. `labels` get how the engine core serves."""

    def __init__(
        self,
        arguments: argparse.Namespace,
        model: Any,
        variant: str,
        prompts: list[list[int]],
        labels: dict[str, Any],
    ) -> None:
        self._options, self._model, self._variant = arguments, model, variant
        self._prompts, self._labels = prompts, labels
        self.read_bytes: int | None = None

    def __call__(self) -> list[float]:
        """Seconds of each step in which all sequences decode together."""
        count, length = len(self._prompts), self._options.prompt_tokens
        steps, device = self._options.new_tokens + _WARM_UP_STEPS, self._options.device
        shape = CausalModel(self._model).shape
        wanted = count * shape.kept_bytes(length + steps + _ROOM_TOKENS)
        kv_bytes = harness.pool_bytes(wanted, device)
        # a request holds its prompt and one token more than it generates
        max_tokens = kv_bytes // shape.kept_bytes(1) // count - length
        if max_tokens <= steps:
            raise MemoryError(f"{count} sequences of {length + steps} tokens exceed {kv_bytes} B")
        core = harness.build_core(
            self._model, shape=self._options.shape, variant=self._variant, kv_memory_bytes=kv_bytes
        )
        self._labels |= harness.served_labels(core, self._variant)
        jobs = [core.add(harness.request(p, "none", 16, max_tokens)) for p in self._prompts]
        while any(not job.sequence.generated for job in jobs):
            _step(core)
        taken_s: list[float] = []
        for _ in range(steps):
            started_s = time.perf_counter()
            _step(core)
            results.synchronize(device)
            taken_s.append(time.perf_counter() - started_s)
        held = sum(length + len(job.sequence.generated) for job in jobs)
        for job in jobs:
            core.cancel(job)
        self.read_bytes = _weight_bytes(self._model, count) + shape.kept_bytes(held)
        return taken_s[_WARM_UP_STEPS:]


def _step(core: Core) -> None:
    """One step, in which no sequence may end: all of them must decode together."""
    for _, event in core.step():
        if isinstance(event, Finished):
            raise RuntimeError(f"a sequence ended too soon: {event.reason}, {event.error}")


def _weight_bytes(model: Any, count: int) -> int:
    """Bytes of weights that a step reads: each matrix, and one embedding row a sequence."""
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    total = sum(weight.nbytes for weight in model.parameters())
    lookup = 0 if head is embedding else embedding.nbytes
    return int(total - lookup + count * embedding[0].nbytes)


class _Clock(StoppingCriteria):
    """A stopping criterion that never stops, and notes when `generate` has each token."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.times_s: list[float] = []

    def __call__(self, input_ids: Any, scores: Any, **unused: Any) -> Any:
        results.synchronize(self._device)
        self.times_s.append(time.perf_counter())
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _generate(model: Any, prompts: list[list[int]], new_tokens: int) -> list[float]:
    """Seconds between the tokens of `generate`, without the first, which has the prefill."""
    device = model.device.type
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


def _continuous_batching(model: Any, prompts: list[list[int]], new_tokens: int) -> list[float]:
    """Seconds of a step in which all sequences decode, of transformers' continuous batching.

    Sequences read first decode while others are still read: only what lies between the last
    sequence's first token and the first sequence's last token counts.
    """
    count = new_tokens + len(prompts) + 1
    config = GenerationConfig(max_new_tokens=count, do_sample=False, eos_token_id=-1)
    outputs = model.generate_batch(
        inputs=prompts, generation_config=config, record_timestamps=True, progress_bar=False
    )
    times_s = [result.timestamps for result in outputs.values()]
    start_s, stop_s = max(t[0] for t in times_s), min(t[-1] for t in times_s)
    drawn = sum(start_s < at <= stop_s for t in times_s for at in t)
    return [(stop_s - start_s) * len(prompts) / drawn]


if __name__ == "__main__":
    main()
