"""Llama-3.1-8B's shapes with random weights, and whether the engine's passes agree with its own."""

from __future__ import annotations

import time

from gpu_sections.bench import Bench
from gpu_sections.record import Figures, Record


def run(bench: Bench, record: Record) -> None:
    if record.attempt({"step": "make"}, lambda: _make(bench)):
        record.attempt({"step": "check"}, lambda: _check(bench))


def _make(bench: Bench) -> Figures:
    started_s = time.perf_counter()
    weights = list(bench.hf.parameters())
    return {
        "time": (time.perf_counter() - started_s, "s"),
        "weights": (sum(weight.nbytes for weight in weights), "bytes"),
        "parameters": (sum(weight.numel() for weight in weights), "parameters"),
    }


def _check(bench: Bench) -> Figures:
    """Raises what loading a model would raise."""
    from gemserve.model.check import check_servable

    started_s = time.perf_counter()
    check_servable(bench.causal())
    return {"time": (time.perf_counter() - started_s, "s")}
