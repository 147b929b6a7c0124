"""What a request costs under each filter method, in floating-point operations and bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from gemserve.config import DEFAULT_METHOD
from gemserve.contract.filter_options import MAX_QUESTION_TOKENS, FilterMethod
from gemserve.contract.filter_plan import GROUP_TOKENS
from gemserve.cost import ModelShape
from gemserve.filtering.methods import METHODS


def prompt_flops(
    shape: ModelShape,
    method: FilterMethod,
    num_tokens: int,
    keep: int,
    layer: int,
    segment_size: int | None = None,
) -> float:
    """FLOPs up to the first token's logits, with the second pass.

    `segment_size`: the prompt is read in segments of so many tokens, with a question of
    `MAX_QUESTION_TOKENS` behind each. None: it is read as one sequence.
    """
    entry = METHODS[method]
    whole = shape.prefill_chunk(0, num_tokens) + shape.head()
    if entry.keeps_everything or num_tokens <= keep:
        return whole
    if entry.evictor is not None:
        return whole + entry.evictor.score_flops(shape, num_tokens)
    kept = shape.prefill_chunk(0, keep) + shape.head()
    if entry.selector is None:
        return kept
    if segment_size is None or segment_size >= num_tokens:
        scoring = entry.selector.score_flops(shape, num_tokens)
        return shape.filter_chunk(0, num_tokens, layer) + scoring + kept
    read = segment_size + MAX_QUESTION_TOKENS
    scoring = entry.selector.score_flops(shape, read)
    return num_tokens / segment_size * (shape.filter_chunk(0, read, layer) + scoring) + kept


def reading_bytes(
    shape: ModelShape,
    method: FilterMethod,
    num_tokens: int,
    layer: int,
    segment_size: int | None = None,
) -> int:
    """Bytes held while a filtered prompt is read; 0 if no pass reads the whole prompt.

    `segment_size`: as in `prompt_flops`. The pass then holds one group of segments.
    """
    if segment_size is not None and segment_size < num_tokens:
        size = max(segment_size, min(GROUP_TOKENS, num_tokens))
        return shape.filter_bytes(size + ceil(size / segment_size) * MAX_QUESTION_TOKENS, layer)
    if METHODS[method].evictor is not None:
        return shape.whole_bytes(num_tokens)
    return shape.filter_bytes(num_tokens, layer) if METHODS[method].has_layer else 0


def _decoding_bytes(shape: ModelShape, method: FilterMethod, num_kept: int, max_tokens: int) -> int:
    """Bytes held while an answer is generated from `num_kept` tokens."""
    if METHODS[method].evictor is not None:
        return shape.whole_bytes(num_kept + max_tokens)
    is_whole = METHODS[method].keeps_everything  # and other prompts may begin like it
    return shape.kept_bytes(num_kept + max_tokens, num_kept if is_whole else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reader:
    """A model that looks at prompts for the one that answers, up to its filter layer.

    `segment_size`: the most tokens of its segments. `memory_bytes`: of its keys and values. `keep`:
    tokens that it keeps of the prompt.
    """

    shape: ModelShape
    layer: int
    segment_size: int
    memory_bytes: int
    keep: int


@dataclass(frozen=True, slots=True, kw_only=True)
class MethodPlan:
    """One row of `gemserve plan`. `bound`: FLOPs of a full read over FLOPs of this method.

    `window`: the most tokens of a segment; None: the prompt is read as one sequence. `has_reader`:
    another model looks.
    """

    method: FilterMethod
    has_reader: bool = False
    window: int | None
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
    segment_size: int | None = None,
    reader: Reader | None = None,
) -> list[MethodPlan]:
    """Cost of one request under each method, and how many fit in `memory_bytes` at once.

    Methods that read segments have a second row for segments of `segment_size` tokens, if it is
    given, and a last one for the `reader`, if there is one.
    `requests_filtering` counts requests at their peak (reading the prompt), `requests_decoding`
    those past it.
    """
    full = shape.prefill_chunk(0, num_tokens) + shape.head()
    rows: list[MethodPlan] = []
    ways: list[tuple[FilterMethod, int | None]] = []
    for method in methods:
        ways.append((method, None))
        if (
            segment_size is not None
            and segment_size < num_tokens
            and METHODS[method].reads_segments
        ):
            ways.append((method, segment_size))
    for method, size in ways:
        is_filtered = not METHODS[method].keeps_everything and num_tokens > keep
        flops = prompt_flops(shape, method, num_tokens, keep, layer, size)
        decode = _decoding_bytes(shape, method, keep if is_filtered else num_tokens, max_tokens)
        filtering = reading_bytes(shape, method, num_tokens, layer, size) if is_filtered else 0
        rows.append(
            MethodPlan(
                method=method,
                window=size,
                prompt_flops=flops,
                bound=full / flops,
                filter_kv_bytes=filtering,
                decode_kv_bytes=decode,
                requests_filtering=memory_bytes // max(filtering, decode),
                requests_decoding=memory_bytes // decode,
            )
        )
    if reader is not None and num_tokens > reader.keep:
        decode = _decoding_bytes(shape, DEFAULT_METHOD, reader.keep, max_tokens)
        rows += [
            _read_by(reader, row, shape, num_tokens, decode, memory_bytes // decode)
            for row in rows
            if row.window is None and METHODS[row.method].reads_segments
        ]
    return rows


def _read_by(
    reader: Reader, row: MethodPlan, shape: ModelShape, num_tokens: int, decode: int, fitting: int
) -> MethodPlan:
    """A row of a model with this shape, if the reader looks in its place.

    `decode`: bytes of the kept prompt and the answer, `fitting`: how many of these have room.
    """
    looking, keep = (reader.shape, row.method, num_tokens), reader.keep
    of_both = prompt_flops(*looking, keep, reader.layer, reader.segment_size)
    of_kept, own_kept = (s.prefill_chunk(0, keep) + s.head() for s in (reader.shape, shape))
    flops = of_both - of_kept + own_kept
    filtering = reading_bytes(*looking, reader.layer, reader.segment_size)
    return replace(
        row,
        has_reader=True,
        window=reader.segment_size if reader.segment_size < num_tokens else None,
        prompt_flops=flops,
        bound=row.bound * row.prompt_flops / flops,
        filter_kv_bytes=filtering,
        decode_kv_bytes=decode,
        requests_filtering=min(reader.memory_bytes // filtering, fitting),
        requests_decoding=fitting,
    )
