"""How much of a prompt should go through the layers at once on this device.

The server's default is small, for the sake of processors; later sections use what is fastest here.
"""

from __future__ import annotations

from functools import partial

from gpu_sections.bench import Bench
from gpu_sections.record import Figures, Record
from gpu_sections.variants import VARIANTS

METHODS = ("none", "sieve")


def run(bench: Bench, record: Record) -> None:
    """The fastest is the one that reads a prompt soonest, with a filter and without, in sum."""
    measured: dict[int, Figures] = {}

    def measure(chunk_tokens: int) -> Figures:
        found: dict[str, tuple[float | None, str]] = {}
        for method in METHODS:
            found[f"{method}_ttft"] = (_ttft_s(bench, method, chunk_tokens), "s")
            record.check_time()
        measured[chunk_tokens] = found
        return found

    for tokens in bench.scale.chunk_sizes:
        record.attempt({"max_chunk_tokens": tokens}, partial(measure, tokens))
        bench.machine.free()
    if not measured:
        return
    fastest = min(measured, key=lambda tokens: sum(of[0] or 0 for of in measured[tokens].values()))
    for tokens, found in measured.items():
        is_fastest = (int(tokens == fastest), "bool")
        record.add({"max_chunk_tokens": tokens}, {**found, "is_fastest": is_fastest})


def _ttft_s(bench: Bench, method: str, chunk_tokens: int) -> float | None:
    length = bench.scale.chunk_length
    kv_bytes = bench.kv_bytes(method, length, 2)
    core = bench.core(VARIANTS[0], kv_bytes=kv_bytes, chunk_tokens=chunk_tokens)
    bench.warm_up(core, method)
    request = bench.request(method, bench.ids(length, seed=2), 1)
    return bench.time_request(core, request)["ttft"][0]
