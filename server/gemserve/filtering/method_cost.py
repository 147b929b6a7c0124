"""What a request costs under each filter method, in floating-point operations and bytes."""

from __future__ import annotations

from dataclasses import dataclass

from gemserve.cost import ModelShape
from gemserve.filtering.gemfilter import GemFilter
from gemserve.filtering.methods import METHODS
from gemserve.types import MAX_QUESTION_TOKENS, SNAPKV_ROWS, FilterMethod


def score_flops(shape: ModelShape, method: FilterMethod, num_tokens: int) -> float:
    """FLOPs of scoring a prompt's tokens, at most.

    `gemfilter` sums a group's queries, so one row for each key head meets the keys. The other
    methods score several rows of every head, and SnapKV does so in every layer.
    """
    if isinstance(METHODS[method].selector, GemFilter):
        return 2.0 * shape.num_kv_heads * shape.head_dim * num_tokens
    row = 2.0 * shape.num_heads * shape.head_dim * num_tokens
    if METHODS[method].evictor is not None:
        return row * SNAPKV_ROWS * shape.num_layers
    return row * MAX_QUESTION_TOKENS


def prompt_flops(
    shape: ModelShape, method: FilterMethod, num_tokens: int, keep: int, layer: int
) -> float:
    """FLOPs up to the first token's logits, with the second pass."""
    whole = shape.prefill_chunk(0, num_tokens) + shape.head()
    if method == "none" or num_tokens <= keep:
        return whole
    if METHODS[method].evictor is not None:
        return whole + score_flops(shape, method, num_tokens)
    kept = shape.prefill_chunk(0, keep) + shape.head()
    if METHODS[method].blind is not None:
        return kept
    return shape.filter_chunk(0, num_tokens, layer) + score_flops(shape, method, num_tokens) + kept


def reading_bytes(shape: ModelShape, method: FilterMethod, num_tokens: int, layer: int) -> int:
    """Bytes held while a filtered prompt is read; 0 if no pass reads the whole prompt."""
    if METHODS[method].evictor is not None:
        return shape.kept_bytes(num_tokens)
    return 0 if METHODS[method].blind is not None else shape.filter_bytes(num_tokens, layer)


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
    methods: tuple[FilterMethod, ...],
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
    full = prompt_flops(shape, "none", num_tokens, keep, layer)
    rows: list[MethodPlan] = []
    for method in methods:
        is_filtered = method != "none" and num_tokens > keep
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
