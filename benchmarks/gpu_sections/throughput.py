"""Requests per second of long prompts, as many in progress as an engine is given: a closed loop."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

from gpu_sections.bench import Bench
from gpu_sections.record import Figures, OutOfTime, Record
from gpu_sections.variants import VARIANTS, Variant

_MEMORY_SHARE = 0.85


def run(bench: Bench, record: Record) -> None:
    wanted = [(VARIANTS[0], "none")]
    wanted += [(variant, "sieve") for variant in VARIANTS if variant.serves]
    for index, (variant, method) in enumerate(wanted):
        labels: dict[str, Any] = {
            "variant": variant.name,
            "method": method,
            "prompt_tokens": bench.scale.served_tokens,
            "max_tokens": bench.scale.served_new_tokens,
            "at_once": bench.scale.served_at_once,
        }
        obstacle = variant.find_obstacle(is_cuda=bench.machine.is_cuda)
        if obstacle is not None:
            record.skip(labels, obstacle)
            continue
        labels |= bench.served(variant)
        limit_s = record.left_s / (len(wanted) - index)
        record.attempt(labels, partial(_measure, bench, variant, method, limit_s))
        bench.machine.free()


def _measure(bench: Bench, variant: Variant, method: str, limit_s: float) -> Figures:
    """Until all requests are answered, or the time is up."""
    scale = bench.scale
    kv_bytes = scale.served_at_once * bench.kv_bytes(
        "none", scale.served_tokens, scale.served_new_tokens
    )
    available = bench.machine.available_bytes()
    if available is not None:
        kv_bytes = min(kv_bytes, int(_MEMORY_SHARE * available))
    core = bench.core(variant, kv_bytes=kv_bytes)
    bench.warm_up(core, method)
    waiting = [
        bench.request(method, bench.ids(scale.served_tokens, seed), scale.served_new_tokens)
        for seed in range(scale.served_requests)
    ]
    started_s = time.perf_counter()
    finished = _serve(core, waiting, scale.served_at_once, started_s + limit_s)
    taken_s = time.perf_counter() - started_s
    if not finished:
        raise OutOfTime
    shape, rate = bench.shape, finished / taken_s
    flops: Any = partial(
        shape.prompt_flops,
        num_tokens=scale.served_tokens,
        keep=scale.keep,
        layer=scale.filter_layer,
    )
    return {
        "requests": (rate, "requests/s"),
        "prompt": (rate * scale.served_tokens, "tokens/s"),
        "generated": (rate * scale.served_new_tokens, "tokens/s"),
        "prompt_flops_to_none": (flops(method) / flops("none"), "1"),
        "time": (taken_s, "s"),
        "finished": (finished, "requests"),
        "asked": (scale.served_requests, "requests"),
    }


def _serve(core: Any, waiting: list[Any], at_once: int, until_s: float) -> int:
    """How many have finished; whatever has not by then is cancelled."""
    from gemserve.types import Finished

    running: set[Any] = set()
    finished = 0
    try:
        while waiting or running:
            while waiting and len(running) < at_once:
                running.add(core.add(waiting.pop()))
            for job, event in core.step():
                if isinstance(event, Finished):
                    if event.error is not None:
                        raise RuntimeError(f"a request failed: {event.error}")
                    running.discard(job)
                    finished += 1
            if time.perf_counter() > until_s:
                break
    finally:
        for job in running:
            core.cancel(job)
    return finished
