"""Which implementation evaluates an attention part on which device."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch

from gemserve_kernels.attention import AttentionBackend, Partial, reference_attention
from gemserve_kernels.spans import Spans


def select_backend(device: torch.device, *, name: str | None = None) -> AttentionBackend:
    """The backend called `name`, or the one for `device`; all of them return log-sum-exps.

    Raises `ValueError` if there is none, or if it needs what is not installed.
    """
    by_device: dict[str, tuple[type[Reference | AtenCpu | AtenCuda], ...]] = {
        "cpu": (AtenCpu, Reference),
        "cuda": (AtenCuda, Reference, TritonCuda),
    }
    if device.type not in by_device:
        raise ValueError(f"device={device}: no attention backend; use cpu or cuda")
    known = {backend.name: backend for backend in by_device[device.type]}
    chosen = known.get(name or next(iter(known)))
    if chosen is None:
        raise ValueError(f"backend={name!r}: on {device.type} there are {', '.join(known)}")
    if chosen is TritonCuda and find_spec("triton") is None:
        raise ValueError(f"backend={name!r} needs triton: pip install 'gemserve[cuda]'")
    return chosen()


def _decode_one_by_one(
    backend: AttentionBackend,
    query: torch.Tensor,
    keys: Sequence[torch.Tensor],
    values: Sequence[torch.Tensor],
    scale: float,
) -> torch.Tensor:
    """Decode as a part for each sequence."""
    parts = [
        backend.part(q.unsqueeze(1), k, v, scale=scale, is_causal=False)
        for q, k, v in zip(query, keys, values, strict=True)
    ]
    return torch.stack([part.out[:, 0] for part in parts])


class Reference:
    """Plain torch, any device: what the others are tested against."""

    name = "reference"

    def part(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        is_causal: bool,
    ) -> Partial:
        mask = None
        if is_causal:
            mask = torch.ones(query.shape[1], key.shape[1], dtype=torch.bool).tril()
            mask = mask.to(query.device)
        return reference_attention(query, key, value, scale=scale, mask=mask)

    def decode(
        self,
        query: torch.Tensor,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        *,
        scale: float,
    ) -> torch.Tensor:
        """See `AttentionBackend.decode`."""
        return _decode_one_by_one(self, query, keys, values, scale)


class AtenCpu:
    """torch's fused CPU kernel."""

    name = "aten-cpu"

    def part(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        is_causal: bool,
    ) -> Partial:
        # with zero keys this kernel kills the process (SIGFPE) instead of raising
        assert key.shape[1] > 0
        assert not is_causal or query.shape[1] == key.shape[1]
        heads, queries, head_dim = query.shape
        kv_heads = key.shape[0]
        group = heads // kv_heads
        if is_causal:  # heads of a group share their key head through a stride of 0: no copy
            q = query.reshape(kv_heads, group, queries, head_dim)
            k, v = (t.unsqueeze(1).expand(-1, group, -1, -1) for t in (key, value))
        else:  # a group's heads are rows of one product, so that each key is read once
            q = query.reshape(1, kv_heads, group * queries, head_dim)
            k, v = key.unsqueeze(0), value.unsqueeze(0)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, scale=scale
        )
        return Partial(out.reshape(heads, queries, head_dim), lse.reshape(heads, queries))

    def decode(
        self,
        query: torch.Tensor,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        *,
        scale: float,
    ) -> torch.Tensor:
        """See `AttentionBackend.decode`."""
        sequences, heads, head_dim = query.shape
        kv_heads = keys[0].shape[0]
        # a group's query heads are the rows of one small matrix: each key is read once
        grouped = query.view(sequences, 1, kv_heads, heads // kv_heads, head_dim)
        outs = [
            torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                q, k.unsqueeze(0), v.unsqueeze(0), 0.0, False, scale=scale
            )[0]
            for q, k, v in zip(grouped, keys, values, strict=True)
        ]
        return torch.cat(outs).reshape(sequences, heads, head_dim)


class AtenCuda:
    """torch's fused CUDA kernels: flash for half precision, memory-efficient for float32."""

    name = "aten-cuda"

    def part(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        scale: float,
        is_causal: bool,
    ) -> Partial:
        assert key.shape[1] > 0
        assert not is_causal or query.shape[1] == key.shape[1]
        group = query.shape[0] // key.shape[0]
        key, value = (t.repeat_interleave(group, dim=0).unsqueeze(0) for t in (key, value))
        query = query.unsqueeze(0)
        if query.dtype in (torch.float16, torch.bfloat16):
            out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
                query, key, value, 0.0, is_causal, False, scale=scale
            )
        else:
            out, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
                query, key, value, None, True, 0.0, is_causal, scale=scale
            )
        # the kernels pad the rows of their log-sum-exp
        return Partial(out[0], lse[0, :, : query.shape[2]])

    def decode(
        self,
        query: torch.Tensor,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        *,
        scale: float,
    ) -> torch.Tensor:
        """See `AttentionBackend.decode`."""
        return _decode_one_by_one(self, query, keys, values, scale)


class TritonCuda(AtenCuda):
    """As torch's, but a decode step of all sequences takes one or two launches of our own kernels.

    Chosen by name only: it has never run on a GPU.
    """

    name = "triton-cuda"

    def decode(
        self,
        query: torch.Tensor,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
        *,
        scale: float,
    ) -> torch.Tensor:
        """See `AttentionBackend.decode`; keys and values are views of one memory."""
        from gemserve_kernels.triton_decode import decode_attention

        spans = Spans.of_views(keys, values)
        return decode_attention(query, spans, layer=0, scale=scale).out.transpose(0, 1)
