"""All tensor operations of one kind of machine, in one object that is chosen once."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from gemserve_kernels.attention import Partial, join, merge
from gemserve_kernels.attention_backends import ATTENTION, AtenCpu, Attention, Reference
from gemserve_kernels.attention_scores import grouped_probabilities, largest_attention, pooled
from gemserve_kernels.decode import decode_attention
from gemserve_kernels.kv_copy import gather_tokens, write_tokens
from gemserve_kernels.kv_table import Spans
from gemserve_kernels.ntk import ntk_part


class Backend:
    """Plain torch, for any device; other kinds of machines replace what they do better.

    `name`: of what evaluates parts of attention; `kernels`: what does the rest. `is_recordable`:
    `write` and `decode` never wait for the device, and read lengths there.
    """

    kernels = "torch"
    is_recordable = False

    def __init__(self, attention: Attention) -> None:
        self._attention = attention

    @property
    def name(self) -> str:
        return self._attention.name

    def part(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        is_causal: bool,
    ) -> Partial:
        """Attend `query` [heads, queries, head_dim] to `key`, `value` [kv_heads, keys, head_dim].

        There is at least one key. `is_causal` requires as many queries as keys: query i sees keys
        0..i.
        """
        return self._attention.part(query, key, value, scale=scale, is_causal=is_causal)

    def decode(
        self,
        query: torch.Tensor,
        spans: Spans,
        *,
        layer: int,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
    ) -> Partial:
        """See `decode.decode_attention`."""
        return decode_attention(
            query, spans, layer=layer, scale=scale, softcap=softcap, window=window
        )

    def write(self, spans: Spans, key: torch.Tensor, value: torch.Tensor, *, layer: int) -> None:
        """See `kv_copy.write_tokens`."""
        write_tokens(spans, key, value, layer=layer)

    def gather(self, source: torch.Tensor, target: torch.Tensor, chosen: torch.Tensor) -> None:
        """See `kv_copy.gather_tokens`."""
        gather_tokens(source, target, chosen)

    def merge_ntk(
        self,
        parts: Sequence[Partial],
        query: torch.Tensor,
        z_a: torch.Tensor,
        z_b: torch.Tensor,
        k: torch.Tensor,
    ) -> torch.Tensor:
        """Parts of keys and values joined with the term of their queries: see `ntk.merge_ntk`."""
        return merge([*parts, ntk_part(query, z_a, z_b, k)])

    def largest_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        rows: torch.Tensor,
        *,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        """See `attention_scores.largest_attention`."""
        return largest_attention(query, key, rows, scale=scale, softcap=softcap)

    def grouped_probabilities(
        self, query: torch.Tensor, key: torch.Tensor, *, scale: float, softcap: float | None
    ) -> torch.Tensor:
        """See `attention_scores.grouped_probabilities`."""
        return grouped_probabilities(query, key, scale=scale, softcap=softcap)

    def pooled(self, scores: torch.Tensor, *, kind: str, width: int = 5) -> torch.Tensor:
        """See `attention_scores.pooled`."""
        return pooled(scores, kind=kind, width=width)


class CpuBackend(Backend):
    """Decodes by torch's fused kernel, sequence by sequence: nothing is faster on a CPU."""

    def decode(
        self,
        query: torch.Tensor,
        spans: Spans,
        *,
        layer: int,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
    ) -> Partial:
        if softcap is not None:
            return super().decode(
                query, spans, layer=layer, scale=scale, softcap=softcap, window=window
            )
        sequences, heads, head_dim = query.shape
        kv_heads, rows = spans.kv_heads, spans.rows
        # a group's query heads are the rows of one small product: each key is read once
        grouped = query.reshape(sequences, 1, kv_heads, heads // kv_heads, head_dim)
        outs: list[torch.Tensor] = []
        lses: list[torch.Tensor] = []
        for q, place in zip(grouped, spans.places, strict=True):
            first, to_head, to_value, to_layer, length = place
            seen = length if window is None else min(window, length)
            if seen == 0:  # which would kill the process
                outs.append(torch.zeros_like(q))
                lses.append(torch.full(q.shape[:-1], -torch.inf))
                continue
            size, steps = (1, kv_heads, seen, head_dim), (0, to_head * head_dim, head_dim, 1)
            start = first + layer * to_layer + length - seen
            k, v = (
                rows.as_strided(size, steps, rows.storage_offset() + row * head_dim)
                for row in (start, start + to_value)
            )
            out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, False, scale=scale
            )
            outs.append(out)
            lses.append(lse)
        joined = torch.cat(outs).reshape(sequences, heads, head_dim)
        return Partial(joined.transpose(0, 1), torch.cat(lses).reshape(sequences, heads).T)


class TritonBackend(Backend):
    """Our own kernels on CUDA, for everything but parts. It has never run on a GPU."""

    kernels = "triton"
    is_recordable = True

    def decode(
        self,
        query: torch.Tensor,
        spans: Spans,
        *,
        layer: int,
        scale: float,
        softcap: float | None = None,
        window: int | None = None,
    ) -> Partial:
        from gemserve_kernels.triton_decode import decode_attention

        return decode_attention(
            query, spans, layer=layer, scale=scale, softcap=softcap, window=window
        )

    def write(self, spans: Spans, key: torch.Tensor, value: torch.Tensor, *, layer: int) -> None:
        from gemserve_kernels.triton_kv_copy import write_tokens

        write_tokens(spans, key, value, layer=layer)

    def gather(self, source: torch.Tensor, target: torch.Tensor, chosen: torch.Tensor) -> None:
        from gemserve_kernels.triton_kv_copy import gather_tokens

        gather_tokens(source, target, chosen)

    def merge_ntk(
        self,
        parts: Sequence[Partial],
        query: torch.Tensor,
        z_a: torch.Tensor,
        z_b: torch.Tensor,
        k: torch.Tensor,
    ) -> torch.Tensor:
        from gemserve_kernels.triton_ntk import merge_ntk

        return merge_ntk(join(parts), query, z_a, z_b, k)

    def largest_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        rows: torch.Tensor,
        *,
        scale: float,
        softcap: float | None,
    ) -> torch.Tensor:
        from gemserve_kernels.triton_attention_scores import largest_attention

        return largest_attention(query, key, rows, scale=scale, softcap=softcap)

    def grouped_probabilities(
        self, query: torch.Tensor, key: torch.Tensor, *, scale: float, softcap: float | None
    ) -> torch.Tensor:
        from gemserve_kernels.triton_attention_scores import grouped_probabilities

        return grouped_probabilities(query, key, scale=scale, softcap=softcap)

    def pooled(self, scores: torch.Tensor, *, kind: str, width: int = 5) -> torch.Tensor:
        from gemserve_kernels.triton_pooling import pooled

        return pooled(scores, kind=kind, width=width)


def select_backend(
    device: torch.device,
    *,
    name: str | None = None,
    dtype: torch.dtype | None = None,
    head_dim: int | None = None,
) -> Backend:
    """The backend for `device` whose parts `name` evaluates; None or "auto": the first that can.

    "reference" is plain torch throughout. Elsewhere on CUDA, Triton's kernels do the rest where
    triton is installed. `dtype`, `head_dim`: of keys and values, if they are known already.

    Raises `ValueError` with the reason if there is none.
    """
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device={device}: no attention backend; use cpu or cuda")
    by_name = {attention.name: attention for attention in ATTENTION}
    if name in (None, "auto"):
        able = (a for a in ATTENTION if a.find_obstacle(device, dtype, head_dim) is None)
        chosen = next(able)
    else:
        if name not in by_name:
            raise ValueError(f"attention_backend={name}: must be one of auto, {', '.join(by_name)}")
        chosen = by_name[name]
        obstacle = chosen.find_obstacle(device, dtype, head_dim)
        if obstacle is not None:
            raise ValueError(f"attention_backend={name}: {obstacle}")
    if isinstance(chosen, Reference):
        return Backend(chosen)
    if isinstance(chosen, AtenCpu):
        return CpuBackend(chosen)
    return TritonBackend(chosen) if find_spec("triton") is not None else Backend(chosen)
