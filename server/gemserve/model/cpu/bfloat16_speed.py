"""Whether a processor multiplies matrices in bfloat16 faster than in float32.

Its instructions do not tell. Processors with AVX-512's bfloat16 instructions took 1.7 times as long
with them as in float32, or a fifth of the time (docs/log/cpu-speed.md), so a product is timed.
"""

from __future__ import annotations

import logging
import time
from functools import cache

import torch
from torch.nn.functional import linear

log = logging.getLogger("gemserve.loading")
_TOKENS, _WIDTH = 256, 1024  # a slice of a prompt, and a small model's width
_ROUNDS = 9
# What is not a product gains nothing: with products 4.6 times as fast, prompts are read in half
# the time.
_LEAST_GAIN = 1.5


@cache
def is_bfloat16_faster() -> bool:
    """Whether prompts are read faster in bfloat16 on this processor.

    Known for processors with AMX and for those without bfloat16 instructions; else it is measured
    once in a process, in 0.1 s.
    """
    if torch.cpu._is_amx_tile_supported():
        return True
    if not torch.cpu._is_avx512_bf16_supported():
        return False
    gain = _measured_gain()
    log.info("products in bfloat16 are %.1f times as fast as in float32 on this processor", gain)
    return gain >= _LEAST_GAIN


def _measured_gain() -> float:
    """How many times as fast linear layers are in bfloat16, by the fastest of some rounds."""
    best_s = {torch.float32: float("inf"), torch.bfloat16: float("inf")}
    with torch.inference_mode():
        inputs = {dtype: torch.ones(_TOKENS, _WIDTH, dtype=dtype) for dtype in best_s}
        weights = {dtype: torch.ones(_WIDTH, _WIDTH, dtype=dtype) for dtype in best_s}
        for _ in range(_ROUNDS):  # in turn, so that other work on the machine meets both
            for dtype in best_s:
                started_s = time.perf_counter()
                linear(inputs[dtype], weights[dtype])
                best_s[dtype] = min(best_s[dtype], time.perf_counter() - started_s)
    return best_s[torch.float32] / best_s[torch.bfloat16]
