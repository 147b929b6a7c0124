"""A forward pass with gradients: the model with an adapter, over batches of sequences.

Serving writes keys and values into memory and has no gradients. Here the same adapters are applied
to plain causal attention.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import AttentionInterface

from gemserve.model.adapter import Adapter, AttentionOptions
from gemserve.model.causal_model import CausalModel
from gemserve_kernels import Partial, merge, select_backend
from gemserve_kernels.attention import reference_attention

TRAINING_ATTENTION = "gemserve-training"
Record = Callable[[int, torch.Tensor, Partial, Partial], None]


def logits_with_gradients(
    base: CausalModel, adapter: Adapter, input_ids: torch.Tensor, record: Record | None = None
) -> torch.Tensor:
    """Logits of every token: [batch, tokens, vocab], at least float32.

    Gradients reach the adapter. `record` is called in every layer that the adapter changes. It gets
    the layer, the queries [heads, batch · tokens, head_dim], and the parts of their attention: to
    their own sequence and to the adapter.
    """
    AttentionInterface.register(TRAINING_ATTENTION, training_attention)
    num_tokens = input_ids.shape[1]
    first = adapter.num_positions
    positions = torch.arange(first, first + num_tokens, device=input_ids.device)[None]
    with base.attention_named(TRAINING_ATTENTION):
        out = base.with_adapter(adapter, first + num_tokens)(
            input_ids=input_ids,
            position_ids=positions,
            use_cache=False,
            adapter=adapter,
            record=record,
        )
    return out.logits.to(torch.promote_types(out.logits.dtype, torch.float32))


def training_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    adapter: Adapter,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    record: Record | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention with the adapter's part, all differentiable.

    `query`: [batch, heads, tokens, head_dim]. Padding is on the right, where it needs no mask.
    """
    batch, heads, tokens, head_dim = query.shape
    scale = scaling if scaling is not None else head_dim**-0.5
    options = AttentionOptions(scale=scale, window=sliding_window, softcap=softcap)
    rows = torch.arange(tokens, device=query.device)
    mask = rows[None] <= rows[:, None]
    if sliding_window is not None:
        mask &= rows[None] > rows[:, None] - sliding_window
    # an adapter sees each query alone, so a batch is only more queries
    text_parts = [
        reference_attention(q, k, v, scale=scale, mask=mask, softcap=softcap)
        for q, k, v in zip(query, key, value, strict=True)
    ]
    part = Partial(
        torch.cat([p.out for p in text_parts], 1), torch.cat([p.lse for p in text_parts], 1)
    )
    queries = query.transpose(0, 1).reshape(heads, batch * tokens, head_dim)
    backend = select_backend(query.device, name="reference")
    extra = adapter.part(module.layer_idx, queries, options, backend)
    if record is not None and extra is not None:
        record(module.layer_idx, queries, part, extra)
    out = merge([part] if extra is None else [part, extra])  # [heads, batch · tokens, head_dim]
    return out.view(heads, batch, tokens, head_dim).permute(1, 2, 0, 3), None
