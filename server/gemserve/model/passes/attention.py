"""The attention function that transformers' layers call when gemserve runs them.

All that a forward pass needs is in a `ForwardContext`, which transformers hands down as a keyword
argument of `forward`. Nothing is patched, and an aborted pass leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from transformers import AttentionInterface

from gemserve.errors import ModelError
from gemserve.model.adapter import NO_ADAPTER, Adapter, AttentionOptions
from gemserve.model.families.head_sizes import fit
from gemserve.model.families.reach import UNSERVED_OPTIONS, Reach
from gemserve.model.passes.kv import KVSpan
from gemserve.model.passes.query_tap import FilterLayerReached, FilterTap, QueryTap
from gemserve.model.passes.transfer import to_device
from gemserve_kernels import Backend, KVTable, Partial, join
from gemserve_kernels.attention import reference_attention

ATTENTION_NAME = "gemserve"
_FEWEST_ROWS = 16  # rows of a block with a mask
_FEWEST_KEYS = (
    # rows of a piece; smaller products are slower, and the pace would then shrink pieces further
    2048
)
_MOST_PARTS = 4  # of a chunk's attention that are held at once, each as large as its output


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkRows:
    """Tokens `start`… of one sequence.

    `kv` holds the keys and values before them and gets theirs.
    """

    kv: KVSpan
    start: int
    counts: ClassVar[tuple[int, ...] | None] = None  # all of the pass

    @property
    def chunks(self) -> tuple[ChunkRows, ...]:
        return (self,)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunksOfOnePass:
    """Chunks of `counts` tokens, one after the other, that do not see each other.

    `start`: which row of a `QueryTap` the first one is. `is_one_call`: one call of the attention
    kernel has all of them, where it can.
    """

    chunks: tuple[ChunkRows, ...]
    counts: tuple[int, ...]
    start: int = 0
    is_one_call: bool = False

    def is_within(self, limit: int | None) -> bool:
        """Does every row see all tokens before it, if it sees at most `limit`?"""
        pairs = zip(self.chunks, self.counts, strict=True)
        return limit is None or all(chunk.start + count <= limit for chunk, count in pairs)


@dataclass(frozen=True, slots=True)
class Breaks:
    """Where a chunk's pass may be paused: see `ForwardContext`."""

    pause: Callable[[], None]
    piece: int


def _never() -> None:
    """Do not pause."""


NO_PAUSES = Breaks(_never, 1 << 62)


def _growing(layer: int) -> tuple[bool, int]:
    """All layers have keys and values of all tokens."""
    return False, layer


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of a pass that have the same adapter. `rows`: [rows], int64; None: all of them."""

    adapter: Adapter
    rows: torch.Tensor | None = None


PLAIN = (Group(NO_ADAPTER),)


def grouped(adapters: Sequence[Adapter], device: torch.device) -> Sequence[Group]:
    """The rows of a decode step grouped by adapter. `adapters` has one for each row."""
    rows_of: dict[Adapter, list[int]] = {}
    for row, adapter in enumerate(adapters):
        rows_of.setdefault(adapter, []).append(row)
    if len(rows_of) == 1:
        return [Group(adapter) for adapter in rows_of]
    return [
        Group(adapter, to_device(rows, torch.long, device)) for adapter, rows in rows_of.items()
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """One forward pass: a chunk of one sequence, chunks of several, or their newest tokens.

    `reaches`: how far back each layer attends. `groups`: the pass's rows by adapter. `query_tap`
    records queries in its layers. `filter_tap` does too, and ends a chunk's pass at its layer.
    `pause` is called before each layer's attention and, within it, after every `piece` query-key
    pairs. The pass may pause there. `windowed_rows`: the newest tokens in layers with a sliding
    window, if the model has any; see `ModelShape.kv_place` for a layer's place in its table.
    """

    rows: ChunkRows | ChunksOfOnePass | KVTable
    windowed_rows: KVTable | None = None
    backend: Backend
    reaches: Sequence[Reach]
    groups: Sequence[Group] = PLAIN
    query_tap: QueryTap | None = None
    filter_tap: FilterTap | None = None
    pause: Callable[[], None] = field(default=_never)
    piece: int | None = None
    kv_place: Callable[[int], tuple[bool, int]] = field(default=_growing)

    @property
    def head_sizes(self) -> tuple[int, int]:
        """How many key heads the pass's memory has in each layer, and their size."""
        if isinstance(self.rows, KVTable):
            return self.rows.kv_heads, self.rows.rows.shape[1]
        return self.rows.chunks[0].kv.head_sizes


def attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    context: ForwardContext,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Store the pass's keys and values, then let every row attend to its sequence so far.

    `query`: [1, heads, rows, key_dim]; `key`: [1, kv_heads, rows, key_dim]; `value`: [1, kv_heads,
    rows, value_dim]; RoPE has been applied. Where they differ from the memory's heads they are
    changed: see `head_sizes`. `s_aux`: the score of each head's attention sink. Returns [1, rows,
    heads, value_dim]. The newest tokens of several sequences may come as [rows, heads, 1, key_dim],
    too.
    """
    for name in UNSERVED_OPTIONS:
        if others.get(name) is not None:
            raise ModelError(f"attention option {name!r} of {type(module).__name__}")
    assert attention_mask is None
    assert dropout == 0.0
    options = AttentionOptions(
        scale=scaling if scaling is not None else query.shape[-1] ** -0.5,
        reach=context.reaches[module.layer_idx],
        softcap=softcap,
        sinks=s_aux,
    )
    layer: int = module.layer_idx
    value_dim = value.shape[-1]
    q, k, v = fit(_rows(query), _rows(key), _rows(value), *context.head_sizes)
    if isinstance(context.rows, KVTable):
        out = _decode(context, layer, q, k, v, options)
        out = out[..., :value_dim].contiguous()
        return out.unflatten(0, (query.shape[0], query.shape[2])), None
    start, chunks = context.rows.start, context.rows.chunks
    counts = context.rows.counts or (q.shape[1],)
    filter_tap = context.filter_tap
    listener = context.query_tap if filter_tap is None else filter_tap.queries
    if listener is not None:
        listener.record(layer, q, start, options.scale, softcap)
    if filter_tap is not None and layer == filter_tap.layer:
        limit = options.reach.limit
        if limit is not None and limit < filter_tap.num_tokens:
            raise ModelError(
                f"filter layer {layer} sees only {options.reach}: choose a layer with full "
                "attention"
            )
        for chunk, key in zip(chunks, k.split(counts, dim=1), strict=True):
            chunk.kv.write_keys(layer, chunk.start, key)
        raise FilterLayerReached
    context.pause()
    of_chunks = zip(chunks, *(x.split(counts, dim=1) for x in (q, k, v)), strict=True)
    if _is_one_call(context.rows, options):
        out = _attend_at_once(context, layer, q, [(c, k, v) for c, _, k, v in of_chunks], options)
    else:
        outs = [
            _attend(context, chunk, layer, some_q, some_k, some_v, options)
            for chunk, some_q, some_k, some_v in of_chunks
        ]
        out = outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)
    # contiguous, as transformers' own functions return it: some layers take a view of it
    return out[..., :value_dim].transpose(0, 1).contiguous().unsqueeze(0), None


def _rows(numbers: torch.Tensor) -> torch.Tensor:
    """[heads, rows, head_dim] of what a layer passes: see `attention`."""
    return numbers[0] if numbers.shape[0] == 1 else numbers[:, :, 0].transpose(0, 1)


def _decode(
    context: ForwardContext,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attention of one token of each sequence: [sequences, heads, head_dim]."""
    backend, (is_windowed, index) = context.backend, context.kv_place(layer)
    spans = context.windowed_rows if is_windowed else context.rows
    assert isinstance(spans, KVTable)
    backend.write(spans, key, value, layer=index)
    reach = options.reach
    part = backend.decode(
        query.transpose(0, 1),
        spans if reach.chunk is None else spans.newest_chunks(reach.chunk),
        layer=index,
        scale=options.scale,
        softcap=options.softcap,
        window=reach.window,
    )
    if context.groups[0].rows is None:
        (group,) = context.groups
        return group.adapter.joined(layer, query, [part], options, backend).transpose(0, 1)
    out = torch.empty_like(part.out)
    for group in context.groups:
        rows = group.rows
        of_group = Partial(part.out[:, rows], part.lse[:, rows])
        out[:, rows] = group.adapter.joined(layer, query[:, rows], [of_group], options, backend)
    return out.transpose(0, 1)


def _attend(
    context: ForwardContext,
    chunk: ChunkRows,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attention of a chunk: [heads, tokens, head_dim]."""
    start, stop = chunk.start, chunk.start + query.shape[1]
    limit = options.reach.limit
    if options.softcap is not None or (limit is not None and stop > limit):
        return _dense(context, chunk, layer, query, key, value, options)
    chunk.kv.write(layer, start, key, value)
    step = start if context.piece is None else max(_FEWEST_KEYS, context.piece // query.shape[1])
    parts: list[Partial] = []
    for past_k, past_v in chunk.kv.parts(layer, start):
        for low in range(0, past_k.shape[1], step):
            some_k, some_v = past_k[:, low : low + step], past_v[:, low : low + step]
            part = context.backend.part(query, some_k, some_v, scale=options.scale, is_causal=False)
            parts.append(part)
            if len(parts) == _MOST_PARTS:
                parts = [_folded(parts)]
            context.pause()
    own = context.backend.part(query, key, value, scale=options.scale, is_causal=True)
    # the first, because the result has its dtype
    return _joined(context, layer, query, options, [own, *parts])


def _folded(parts: Sequence[Partial]) -> Partial:
    """One part for several, at least in float32, so that what is folded again loses nothing."""
    first = parts[0]
    wide = first.out.to(torch.promote_types(first.out.dtype, torch.float32))
    return join([replace(first, out=wide), *parts[1:]])


def _is_one_call(rows: ChunkRows | ChunksOfOnePass, options: AttentionOptions) -> bool:
    if not isinstance(rows, ChunksOfOnePass) or not rows.is_one_call:
        return False
    return options.softcap is None and rows.is_within(options.reach.limit)


def _attend_at_once(
    context: ForwardContext,
    layer: int,
    query: torch.Tensor,
    chunks: Sequence[tuple[ChunkRows, torch.Tensor, torch.Tensor]],
    options: AttentionOptions,
) -> torch.Tensor:
    """Attention of several chunks, with their keys and values: [heads, tokens, head_dim]."""
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    for chunk, key, value in chunks:
        chunk.kv.write(layer, chunk.start, key, value)
        seen += [*chunk.kv.parts(layer, chunk.start), (key, value)]
    queries = tuple(key.shape[1] for _, key, _ in chunks)
    keys = tuple(chunk.start + key.shape[1] for chunk, key, _ in chunks)
    key, value = (torch.cat(some, dim=1) for some in zip(*seen, strict=True))
    part = context.backend.several(query, key, value, queries, keys, scale=options.scale)
    return _joined(context, layer, query, options, [part])


def _joined(
    context: ForwardContext,
    layer: int,
    query: torch.Tensor,
    options: AttentionOptions,
    parts: list[Partial],
) -> torch.Tensor:
    """Join a chunk's parts with what its adapter adds: [heads, tokens, head_dim]."""
    (group,) = context.groups
    return group.adapter.joined(layer, query, parts, options, context.backend)


def _dense(
    context: ForwardContext,
    chunk: ChunkRows,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
) -> torch.Tensor:
    """Attention of a chunk in a soft-capped layer or one that does not see all tokens.

    It uses a [chunk, visible] mask. Queries are processed in blocks to bound the memory for scores.
    """
    reach, start, stop = options.reach, chunk.start, chunk.start + query.shape[1]
    seen: int = reach.first(start)  # the first token that any row sees
    key, value = chunk.kv.extend(layer, start, key, value, seen)
    outs: list[torch.Tensor] = []
    pairs = 1 << 22 if context.piece is None else min(1 << 22, context.piece)
    block = max(_FEWEST_ROWS, pairs // stop)
    for low in range(0, query.shape[1], block):
        context.pause()
        high = min(low + block, query.shape[1])
        rows = torch.arange(start + low, start + high, device=query.device)[:, None]
        first: int = reach.first(start + low)
        columns = torch.arange(first, start + high, device=query.device)[None, :]
        mask = columns <= rows
        if reach.limit is not None:
            mask &= columns >= reach.first(rows)
        part = reference_attention(
            query[:, low:high],
            key[:, first - seen : start + high - seen],
            value[:, first - seen : start + high - seen],
            scale=options.scale,
            mask=mask,
            softcap=options.softcap,
        )
        outs.append(_joined(context, layer, query[:, low:high], options, [part]))
    return torch.cat(outs, dim=1)


def register() -> None:
    """Make `attention` known to transformers under `ATTENTION_NAME`. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, attention)
