"""What a request costs under each filter method, in floating-point operations and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gemserve.cost import ModelShape
from gemserve.filtering.methods import METHODS
from gemserve.types import FilterMethod


def prompt_flops(
    shape: ModelShape, method: FilterMethod, num_tokens: int, keep: int, layer: int
) -> float:
    """FLOPs up to the first token's logits, with the second pass."""
    entry = METHODS[method]
    whole = shape.prefill_chunk(0, num_tokens) + shape.head()
    if entry.keeps_everything or num_tokens <= keep:
        return whole
    if entry.evictor is not None:
        return whole + entry.evictor.score_flops(shape, num_tokens)
    kept = shape.prefill_chunk(0, keep) + shape.head()
    if entry.selector is None:
        return kept
    scoring = entry.selector.score_flops(shape, num_tokens)
    return shape.filter_chunk(0, num_tokens, layer) + scoring + kept


def reading_bytes(shape: ModelShape, method: FilterMethod, num_tokens: int, layer: int) -> int:
    """Bytes held while a filtered prompt is read; 0 if no pass reads the whole prompt."""
    if METHODS[method].evictor is not None:
        return shape.kept_bytes(num_tokens)
    return shape.filter_bytes(num_tokens, layer) if METHODS[method].has_layer else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodPlan:
    """One row of `gemserve plan`. `bound`: FLOPs of a full read over FLOPs of this method."""

    method: FilterMethod
    prompt_flops: float
    bound: float
    filter_kv_bytes: int
    decode_kv_bytes: int
    requests_filtering: int
    requests_decoding: int


def plan_methods(
    shape: ModelShape,
    *,
    methods: Sequence[FilterMethod],
    num_tokens: int,
    keep: int,
    max_tokens: int,
    layer: int,
    memory_bytes: int,
) -> list[MethodPlan]:
    """Cost of one request under each method, and how many fit in `memory_bytes` at once.

    `requests_filtering` counts requests at their peak (reading the prompt), `requests_decoding`
    those past it.
    """
    full = shape.prefill_chunk(0, num_tokens) + shape.head()
    rows: list[MethodPlan] = []
    for method in methods:
        is_filtered = not METHODS[method].keeps_everything and num_tokens > keep
        flops = prompt_flops(shape, method, num_tokens, keep, layer)
        decode = shape.kept_bytes((keep if is_filtered else num_tokens) + max_tokens)
        filtering = reading_bytes(shape, method, num_tokens, layer) if is_filtered else 0
        rows.append(
            MethodPlan(
                method=method,
                prompt_flops=flops,
                bound=full / flops,
                filter_kv_bytes=filtering,
                decode_kv_bytes=decode,
                requests_filtering=memory_bytes // max(filtering, decode),
                requests_decoding=memory_bytes // decode,
            )
        )
    return rows
