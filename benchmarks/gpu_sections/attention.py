"""Each attention backend alone, and the same attention within a filter pass."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from gemserve_kernels import select_backend
from gpu_sections.bench import Bench, share
from gpu_sections.machine import Machine, Watch
from gpu_sections.record import Figures, Record
from gpu_sections.variants import NOT_AVAILABLE, VARIANTS, backend_names

_TIMED = "gemserve-timed"
# None of ours: it stands beside them.
SDPA = "torch-sdpa"


def run(bench: Bench, record: Record) -> None:
    alone: dict[tuple[str, int], float] = {}

    def stand_alone(name: str, length: int) -> Figures:
        found = _alone(bench, name, length)
        alone[name, length] = found["rate"][0] or 0.0
        return found

    chosen = bench.causal().backend.name
    # the engine's own choice first
    names = sorted(_available(bench, record), key=lambda name: name != chosen)
    lengths = bench.scale.attention_lengths
    for length in lengths:
        for name in (*names, SDPA):
            labels = {"where": "alone", "backend": name, "prompt_tokens": length}
            record.attempt(labels, partial(stand_alone, name, length))
            bench.machine.free()
    others = [name for name in names if name != chosen]
    wanted = [*((chosen, length) for length in lengths), *((name, lengths[0]) for name in others)]
    per_flop_s = 0.0
    for name, length in wanted:
        flops = bench.shape.prompt_flops(
            "sieve", length, bench.scale.keep, bench.scale.filter_layer
        )
        labels = {"where": "filter pass", "backend": name, "prompt_tokens": length}
        started_s = time.perf_counter()
        record.attempt(
            labels,
            partial(_in_filter_pass, bench, name, length, alone),
            expected_s=flops * per_flop_s,
        )
        bench.machine.free()
        per_flop_s = (time.perf_counter() - started_s) / flops


def _available(bench: Bench, record: Record) -> list[str]:
    """Of the others, a row says why they are not."""
    names: list[str] = []
    for name in backend_names():
        try:
            select_backend(bench.machine.device, name=name)
        except ValueError as error:
            record.skip({"where": "alone", "backend": name}, f"{NOT_AVAILABLE}: {error}")
        else:
            names.append(name)
    return names


def _alone(bench: Bench, name: str, length: int) -> Figures:
    """One layer's causal attention over a whole prompt, in one call."""
    machine, shape = bench.machine, bench.shape
    query = machine.randn(shape.num_heads, length, shape.head_dim)
    key, value = (machine.randn(shape.num_kv_heads, length, shape.head_dim) for _ in range(2))
    scale = shape.head_dim**-0.5
    if name == SDPA:
        q, k, v = (tensor[None] for tensor in (query, key, value))

        def attend() -> object:
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            )
    else:
        backend = select_backend(machine.device, name=name)

        def attend() -> object:
            return backend.part(query, key, value, scale=scale, is_causal=True)

    with torch.inference_mode():
        taken_s = machine.seconds(attend, repeats=3, warm_up=1)
    rate = shape.attention(0, length) / taken_s
    return {
        "time": (taken_s, "s"),
        "rate": (rate, "FLOP/s"),
        "share_of_bf16": (share(rate, bench.ceiling("bf16")), "1"),
    }


def _in_filter_pass(
    bench: Bench, name: str, length: int, alone: dict[tuple[str, int], float]
) -> Figures:
    """What the layers below the filter layer spend in attention, storing and merging included."""
    from transformers import AttentionInterface

    core = bench.core(VARIANTS[0], kv_bytes=bench.kv_bytes("sieve", length, 2))
    core.model.backend = select_backend(bench.machine.device, name=name)
    bench.warm_up(core, "sieve")
    timed = TimedAttention(bench.machine)
    AttentionInterface.register(_TIMED, timed)
    request = bench.request("sieve", bench.ids(length, seed=3), 1, selects_only=True)
    with core.model.attention_named(_TIMED):
        total_s = bench.time_request(core, request)["total"][0] or 0.0
    taken_s = sum(watch.seconds() for watch in timed.watches)
    layers, shape = bench.scale.filter_layer, core.model.shape
    rate = layers * shape.attention(0, length) / taken_s
    return {
        "pass_time": (total_s, "s"),
        "attention_time": (taken_s, "s"),
        "attention_share_of_pass": (taken_s / total_s, "1"),
        "rate": (rate, "FLOP/s"),
        "share_of_alone": (share(rate, alone.get((name, length))), "1"),
        "share_of_bf16": (share(rate, bench.ceiling("bf16")), "1"),
    }


class TimedAttention:
    """The engine's attention function, timed call by call. A call that ends the pass is not."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.watches: list[Watch] = []

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        from gemserve.model.seam import attention

        watch = Watch(self._machine)
        out = attention(*arguments, **options)
        watch.stop()
        self.watches.append(watch)
        return out
