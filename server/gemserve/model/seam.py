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


@dataclass(slots=True)
class FilterTap:
    """Collects, at layer `layer`, every key and the last `window` queries of one prompt.

    `keys`: [kv_heads, num_tokens, head_dim]; `queries`: [heads, window, head_dim]; both post-RoPE.
    Chunks arrive in order; `window` is at most the prompt's length.
    """

    layer: int
    num_tokens: int
    window: int
    keys: torch.Tensor | None = None
    queries: torch.Tensor | None = None
    scale: float = 1.0
    softcap: float | None = None

    @property
    def num_bytes(self) -> int:
        tensors = (self.keys, self.queries)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)

    def record(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        start: int,
        scale: float,
        softcap: float | None,
    ) -> None:
        stop = start + key.shape[1]
        if self.keys is None or self.queries is None:
            self.keys = key.new_empty(key.shape[0], self.num_tokens, key.shape[2])
            self.queries = query.new_empty(query.shape[0], self.window, query.shape[2])
        self.keys[:, start:stop] = key
        window_start = self.num_tokens - self.window
        first = max(start, window_start)
        if first < stop:
            self.queries[:, first - window_start : stop - window_start] = query[:, first - start :]
        self.scale, self.softcap = scale, softcap


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardContext:
    """One forward pass over tokens `start`… of a sequence.

    `kv` receives the pass's keys and values and holds those of the tokens before `start`; `tap`
    ends the pass at its layer.
    """

    kv: KVSpan
    start: int
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
    """Store the chunk's keys and values, then attend to all of the sequence so far.

    `query`: [1, heads, tokens, head_dim]; `key`, `value`: [1, kv_heads, tokens, head_dim], RoPE
    applied. Returns [1, tokens, heads, head_dim].
    """
    for name in ("s_aux", "sinks", "head_mask", "position_bias"):
        if unsupported.get(name) is not None:
            raise ModelError(f"attention option {name!r} of {type(module).__name__}")
    assert attention_mask is None
    assert dropout == 0.0
    q, k, v = query[0], key[0], value[0]
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    layer: int = module.layer_idx
    start, stop = context.start, context.start + q.shape[1]

    if context.tap is not None and layer == context.tap.layer:
        if sliding_window is not None and sliding_window < context.tap.num_tokens:
            raise ModelError(
                f"filter layer {layer} sees only {sliding_window} tokens: choose a layer with "
                "full attention"
            )
        context.tap.record(q, k, start, scale, softcap)
        raise FilterLayerReached

    context.kv.write(layer, start, k, v)
    all_k, all_v = context.kv.read(layer, stop)
    is_windowed = sliding_window is not None and stop > sliding_window
    if softcap is not None or is_windowed:
        out = _dense(q, all_k, all_v, start, scale, sliding_window, softcap)
        return out.transpose(0, 1).unsqueeze(0), None

    parts: list[Partial] = []
    if start > 0:
        past_k, past_v = all_k[:, :start], all_v[:, :start]
        parts.append(context.backend.part(q, past_k, past_v, scale=scale, is_causal=False))
    parts.append(context.backend.part(q, k, v, scale=scale, is_causal=True))
    return merge(parts).transpose(0, 1).unsqueeze(0), None


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
