"""Tokens per second of decoding together, beside what reading weights and keys alone would take."""

from __future__ import annotations

import statistics
import time
from functools import partial
from typing import Any

from gpu_sections.bench import Bench, share
from gpu_sections.record import Figures, Record
from gpu_sections.variants import VARIANTS, Variant

_WARM_UP_STEPS = 3
# Tokens the first of the sequences may generate until the last has been read.
_ROOM_TOKENS = 2048
_FEWEST_STEPS = 5
_MEMORY_SHARE = 0.85


def run(bench: Bench, record: Record) -> None:
    for count in bench.scale.sequences:
        for variant in VARIANTS:
            if not variant.decodes:
                continue
            labels: dict[str, Any] = {"variant": variant.name, "sequences": count}
            obstacle = variant.find_obstacle(is_cuda=bench.machine.is_cuda)
            if obstacle is not None:
                record.skip(labels, obstacle)
                continue
            labels |= bench.served(variant)
            record.attempt(labels, partial(_measure, bench, record, variant, count))
            bench.machine.free()


def _measure(bench: Bench, record: Record, variant: Variant, count: int) -> Figures:
    shape, length = bench.shape, bench.scale.sequence_tokens
    steps = bench.scale.decode_steps + _WARM_UP_STEPS
    kv_bytes = count * shape.kept_bytes(length + steps + _ROOM_TOKENS)
    available = bench.machine.available_bytes()
    if available is not None:
        kv_bytes = min(kv_bytes, int(_MEMORY_SHARE * available))
    # of a request, the prompt and one token more are held without being generated
    max_tokens = kv_bytes // shape.kept_bytes(1) // count - length
    if max_tokens <= steps:
        raise MemoryError(f"{count} sequences of {length + steps} tokens do not fit {kv_bytes} B")
    core = bench.core(variant, kv_bytes=kv_bytes)
    jobs = [
        core.add(bench.request("none", bench.ids(length, seed), max_tokens))
        for seed in range(count)
    ]
    try:
        while any(not job.sequence.generated for job in jobs):
            _step(core, record)
        taken_s: list[float] = []
        for number in range(steps):
            started_s = time.perf_counter()
            _step(core, record if len(taken_s) < _FEWEST_STEPS else None)
            bench.machine.synchronize()
            if number >= _WARM_UP_STEPS:
                taken_s.append(time.perf_counter() - started_s)
            if len(taken_s) >= _FEWEST_STEPS and record.left_s <= 0:
                break
        held = sum(length + len(job.sequence.generated) for job in jobs)
    finally:
        for job in jobs:
            core.cancel(job)
    step_s = statistics.median(taken_s)
    num_bytes = _weight_bytes(bench, count) + shape.kept_bytes(held)
    bandwidth = num_bytes / step_s
    return {
        "step": (step_s, "s"),
        "tokens": (count / step_s, "tokens/s"),
        "read": (num_bytes, "bytes"),
        "bandwidth": (bandwidth, "bytes/s"),
        "share_of_copy": (share(bandwidth, bench.ceiling("copy")), "1"),
        "steps": (len(taken_s), "steps"),
    }


def _step(core: Any, record: Record | None) -> None:
    from gemserve.types import Finished

    for _, event in core.step():
        if isinstance(event, Finished):
            raise RuntimeError(f"a sequence ended too soon: {event.reason}, {event.error}")
    if record is not None:
        record.check_time()


def _weight_bytes(bench: Bench, count: int) -> int:
    """What a step reads: every matrix, and of the embedding one row for each sequence."""
    embedding = bench.hf.get_input_embeddings().weight
    total = sum(weight.nbytes for weight in bench.hf.parameters())
    return total - embedding.nbytes + count * embedding[0].nbytes
