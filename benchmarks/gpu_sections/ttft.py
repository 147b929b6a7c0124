"""Time to first token, memory, and the time of a short answer, by method and prompt length.

Contestants take turns, `none` and `sieve` side by side; medians of as many rounds as time allows.
transformers' own prefill of the same weights runs beside, so that a slow `none` flatters nobody.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from gpu_sections.bench import Bench, share
from gpu_sections.record import Figures, Record
from gpu_sections.variants import VARIANTS, Variant

SDPA = "transformers_sdpa"
_FIRST = ("none", "sieve")
# How much longer than predicted a measurement may take.
_MARGIN = 1.3


@dataclass(slots=True)
class Contestant:
    """One method of one variant, at one length. `variant` None: transformers' own prefill."""

    variant: Variant | None
    method: str
    length: int
    served: dict[str, str]
    samples: list[Figures] = field(default_factory=list)
    has_failed: bool = False

    @property
    def labels(self) -> dict[str, Any]:
        name = "transformers" if self.variant is None else self.variant.name
        own = {"variant": name, "method": self.method, "prompt_tokens": self.length}
        return own | self.served

    def median(self, name: str) -> float | None:
        values = [value for s in self.samples for value, _ in [s.get(name, (None, ""))] if value]
        return statistics.median(values) if values else None


def run(bench: Bench, record: Record) -> None:
    contestants = _contestants(bench, record)
    for number in range(bench.scale.rounds):
        for contestant in contestants:
            if contestant.has_failed:
                continue
            expected_s = _expected_s(bench, contestant, contestants)
            if number > 0 and record.left_s <= expected_s:
                continue  # what it has stands
            contestant.has_failed = not record.attempt(
                contestant.labels,
                partial(_sample, bench, contestant, contestants),
                expected_s=expected_s,
            )
            bench.machine.free()
    for contestant in contestants:  # once more, as the last samples of `none` are known
        if contestant.samples and not contestant.has_failed:
            record.add(contestant.labels, _figures(bench, contestant, contestants))


def _contestants(bench: Bench, record: Record) -> list[Contestant]:
    """In turn: at every length what matters most, then all else."""
    first: list[Contestant] = []
    others: list[Contestant] = []
    for length in bench.scale.lengths:
        for variant in VARIANTS:
            for method in variant.methods:
                obstacle = variant.find_obstacle(is_cuda=bench.machine.is_cuda)
                served = bench.served(variant) if obstacle is None else {}
                made = Contestant(variant, method, length, served)
                if obstacle is not None:
                    record.skip(made.labels, obstacle)
                else:
                    (first if method in _FIRST else others).append(made)
        others.append(Contestant(None, SDPA, length, {}))
    return first + others


def _sample(bench: Bench, contestant: Contestant, all_of_them: list[Contestant]) -> Figures:
    """One more sample; the figures of all there are of this contestant."""
    if contestant.variant is None:
        contestant.samples.append(_prefill(bench, contestant.length))
    else:
        contestant.samples.append(_served(bench, contestant, contestant.variant))
    return _figures(bench, contestant, all_of_them)


def _served(bench: Bench, contestant: Contestant, variant: Variant) -> Figures:
    """On an engine whose KV pool has just the room that the request needs."""
    method, length, new_tokens = contestant.method, contestant.length, bench.scale.new_tokens
    core = bench.core(variant, kv_bytes=bench.kv_bytes(method, length, new_tokens))
    bench.warm_up(core, method)
    request = bench.request(method, bench.ids(length, seed=length), new_tokens)
    return bench.time_request(core, request)


def _prefill(bench: Bench, length: int) -> Figures:
    """The whole prompt at once by transformers, up to its last token's logits."""
    import harness

    model = harness.twin(bench.hf)
    with torch.inference_mode():
        return _forward(bench, model, length)


def _forward(bench: Bench, model: Any, length: int) -> Figures:
    machine = bench.machine
    ids = bench.ids(length, seed=length)
    model(input_ids=torch.tensor([ids[: bench.scale.warm_up_tokens]], device=machine.device))
    machine.synchronize()
    machine.reset_peak()
    started_s = time.perf_counter()
    tokens = torch.tensor([ids], device=machine.device)
    out = model(input_ids=tokens, use_cache=True, logits_to_keep=1)
    out.logits.argmax().item()
    taken_s = time.perf_counter() - started_s
    return {"ttft": (taken_s, "s"), "peak_memory": (machine.peak_bytes(), "bytes")}


def _figures(bench: Bench, contestant: Contestant, all_of_them: list[Contestant]) -> Figures:
    """Medians, and ratios to `none` of the same variant, or of the first one that has it."""
    found: dict[str, tuple[float | None, str]] = {}
    for name, (_, unit) in contestant.samples[0].items():
        found[name] = (contestant.median(name), unit)
    shape, layer, keep = bench.shape, bench.scale.filter_layer, bench.scale.keep
    length, ttft_s = contestant.length, contestant.median("ttft")
    method: Any = "none" if contestant.variant is None else contestant.method
    flops = shape.prompt_flops(method, length, keep, layer)
    found["samples"] = (len(contestant.samples), "runs")
    if ttft_s:
        found["flops"] = (flops / ttft_s, "FLOP/s")
        found["share_of_bf16"] = (share(flops / ttft_s, bench.ceiling("bf16")), "1")
    found["flops_to_none"] = (flops / shape.prompt_flops("none", length, keep, layer), "1")
    if method in ("sieve", "gemfilter"):
        found["layers_to_none"] = (layer / shape.num_layers, "1")
    base = _base(contestant, all_of_them)
    for name in ("ttft", "total", "peak_memory", "peak_kv", "decode_kv"):
        ours, theirs = contestant.median(name), base and base.median(name)
        if ours and theirs:
            found[f"{name}_to_none"] = (ours / theirs, "1")
    return found


def _base(contestant: Contestant, all_of_them: list[Contestant]) -> Contestant | None:
    length = contestant.length
    bases = [c for c in all_of_them if c.method == "none" and c.length == length and c.samples]
    own = [c for c in bases if c.variant is contestant.variant]
    return next(iter(own + bases), None)


def _expected_s(bench: Bench, contestant: Contestant, all_of_them: list[Contestant]) -> float:
    """By this contestant's own last time, or another length's, or another method's; 0: unknown."""
    shape, layer, keep = bench.shape, bench.scale.filter_layer, bench.scale.keep

    def flops(of: Contestant) -> float:
        method: Any = "none" if of.variant is None else of.method
        return shape.prompt_flops(method, of.length, keep, layer)

    timed = [c for c in all_of_them if c.samples]
    if not timed:
        return 0.0
    own = [c for c in timed if (c.variant, c.method) == (contestant.variant, contestant.method)]
    nearest = min(own or timed, key=lambda c: abs(c.length - contestant.length))
    taken_s = nearest.median("total") or nearest.median("ttft") or 0.0
    return _MARGIN * taken_s * max(1.0, flops(contestant) / flops(nearest))
