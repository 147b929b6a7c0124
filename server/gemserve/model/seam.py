"""The one seam into a transformers model: the function its attention layers call.

Everything a forward pass needs travels in a `ForwardContext`, handed down by transformers as a
keyword argument of `forward`. Nothing is patched and nothing remains after an aborted pass.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface

from gemserve.errors import ModelError
from gemserve.model.kv import KVSpan
from gemserve_kernels import AttentionBackend, Partial, merge
from gemserve_kernels.attention import reference_attention

ATTENTION_NAME = "gemserve"


class FilterLayerReached(Exception):
    """Ends a filter pass at the filter layer, whose attention and MLP are not needed."""


@dataclass(slots=True, kw_only=True)
class FilterTap:
    """Collects, at layer `layer`, every key and the last queries of one prompt.

    `keys`: [kv_heads, num_tokens, head_dim]; `queries`: [heads, window, head_dim]; both post-RoPE,
    filled as chunks arrive in order; `window` is at most the prompt's length.
    """

    layer: int
    keys: torch.Tensor
    queries: torch.Tensor
    scale: float = 1.0
    softcap: float | None = None

    @property
    def num_tokens(self) -> int:
        return int(self.keys.shape[1])

    def record(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        start: int,
        scale: float,
        softcap: float | None,
    ) -> None:
        stop = start + key.shape[1]
        self.keys[:, start:stop] = key
        window_start = self.num_tokens - self.queries.shape[1]
        first = max(start, window_start)
        if first < stop:
            self.queries[:, first - window_start : stop - window_start] = query[:, first - start :]
        self.scale, self.softcap = scale, softcap


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Consecutive rows of a forward pass that belong to one sequence.

    The rows are its tokens `start`…`start + count − 1`; `kv` receives their keys and values and
    holds those of the tokens before.
    """

    kv: KVSpan
    start: int
    count: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """One forward pass over the rows of `segments`, in order; `tap` ends it at its layer."""

    segments: tuple[Segment, ...]
    backend: AttentionBackend
    tap: FilterTap | None = None


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
    sliding_window: int | None = None,
    softcap: float | None = None,
    **unsupported: Any,
) -> tuple[torch.Tensor, None]:
    """Store every segment's keys and values, then let it attend to all of its sequence so far.

    `query`: [1, heads, rows, head_dim]; `key`, `value`: [1, kv_heads, rows, head_dim], RoPE
    applied. Returns [1, rows, heads, head_dim].
    """
    for name in ("s_aux", "sinks", "head_mask", "position_bias"):
        if unsupported.get(name) is not None:
            raise ModelError(f"attention option {name!r} of {type(module).__name__}")
    assert attention_mask is None
    assert dropout == 0.0
    q, k, v = query[0], key[0], value[0]
    options = _Options(
        scale=scaling if scaling is not None else q.shape[-1] ** -0.5,
        window=sliding_window,
        softcap=softcap,
    )
    layer: int = module.layer_idx

    if context.tap is not None and layer == context.tap.layer:
        (segment,) = context.segments
        if sliding_window is not None and sliding_window < context.tap.num_tokens:
            raise ModelError(
                f"filter layer {layer} sees only {sliding_window} tokens: choose a layer with "
                "full attention"
            )
        context.tap.record(q, k, segment.start, options.scale, softcap)
        raise FilterLayerReached

    if len(context.segments) == 1:
        out = _attend(context.segments[0], layer, q, k, v, options, context.backend)
        return out.transpose(0, 1).unsqueeze(0), None
    outs: list[torch.Tensor] = []
    row = 0
    for segment in context.segments:
        rows = slice(row, row + segment.count)
        row += segment.count
        outs.append(
            _attend(segment, layer, q[:, rows], k[:, rows], v[:, rows], options, context.backend)
        )
    return torch.cat(outs, dim=1).transpose(0, 1).unsqueeze(0), None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Options:
    scale: float
    window: int | None
    softcap: float | None


def _attend(
    segment: Segment,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: _Options,
    backend: AttentionBackend,
) -> torch.Tensor:
    """One segment's attention: [heads, count, head_dim]."""
    start, stop = segment.start, segment.start + segment.count
    segment.kv.write(layer, start, key, value)
    all_k, all_v = segment.kv.read(layer, stop)
    is_windowed = options.window is not None and stop > options.window
    if options.softcap is not None or is_windowed:
        return _dense(query, all_k, all_v, start, options.scale, options.window, options.softcap)
    if segment.count == 1:  # a decoded token sees all there is, itself included: one part
        return backend.part(query, all_k, all_v, scale=options.scale, is_causal=False).out
    parts: list[Partial] = []
    if start > 0:
        past_k, past_v = all_k[:, :start], all_v[:, :start]
        parts.append(backend.part(query, past_k, past_v, scale=options.scale, is_causal=False))
    parts.append(backend.part(query, key, value, scale=options.scale, is_causal=True))
    return merge(parts)


def _dense(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    scale: float,
    window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    """Soft-capped or windowed attention of a chunk, with a [chunk, visible] mask.

    Queries go in blocks, so that the scores held at once stay bounded.
    """
    outs: list[torch.Tensor] = []
    block = max(1, (1 << 22) // key.shape[1])
    for low in range(0, query.shape[1], block):
        high = min(low + block, query.shape[1])
        rows = torch.arange(start + low, start + high, device=query.device)[:, None]
        first = 0 if window is None else max(0, start + low - window + 1)
        columns = torch.arange(first, start + high, device=query.device)[None, :]
        mask = columns <= rows
        if window is not None:
            mask &= columns > rows - window
        part = reference_attention(
            query[:, low:high],
            key[:, first : start + high],
            value[:, first : start + high],
            scale=scale,
            mask=mask,
            softcap=softcap,
        )
        outs.append(part.out)
    return torch.cat(outs, dim=1)


def register() -> None:
    """Make the seam known to transformers under `ATTENTION_NAME`. Idempotent."""
    AttentionInterface.register(ATTENTION_NAME, attention)
