"""The two losses of the built-in model: on answers and on guided attention."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface, LlamaForCausalLM

from recipes.builtin_model.corpus import TrainingBatch
from recipes.builtin_model.guides import GuidedShape


class FilterLayerReached(Exception):
    """Ends a forward pass that needs only q and k of the filter layer."""


@dataclass(slots=True)
class CapturedLayers:
    """Post-RoPE (q, k) by layer, each [batch, heads, tokens, head_dim]."""

    shape: GuidedShape
    is_last: bool  # nothing after the filter layer is needed
    layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


def training_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    captured: CapturedLayers | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention that stores q and k in `captured`."""
    if captured is not None:
        captured.layers[module.layer_idx] = (query, key)
        if captured.is_last and module.layer_idx == captured.shape.filter_layer:
            raise FilterLayerReached
    out = F.scaled_dot_product_attention(query, key, value, is_causal=True, scale=scaling)
    return out.transpose(1, 2).contiguous(), None


def register_training_attention() -> str:
    """Make `training_attention` known to transformers; returns its name there. Idempotent."""
    AttentionInterface.register("gemserve_training", training_attention)
    return "gemserve_training"


def hidden_states(
    model: LlamaForCausalLM, batch: TrainingBatch, captured: CapturedLayers
) -> torch.Tensor:
    """The decoder's output: [batch, tokens, hidden]."""
    out: torch.Tensor = model.model(
        input_ids=torch.from_numpy(batch.tokens),
        position_ids=torch.from_numpy(batch.positions),
        use_cache=False,
        captured=captured,
    ).last_hidden_state
    return out


def pointer_loss(captured: CapturedLayers, batch: TrainingBatch) -> torch.Tensor:
    """−log of the attention that guided heads pay along the batch's pointers.

    It is averaged over the pointers of one position, then over positions and heads, and summed over
    the guides.
    """
    total = torch.zeros(())
    pointers = torch.from_numpy(batch.pointers)
    for guide, (layer, heads) in captured.shape.guided.items():
        pairs = pointers[pointers[:, 0] == guide, 1:]
        if layer not in captured.layers or not len(pairs):
            continue
        query, key = captured.layers[layer]
        loss = torch.zeros(())
        num_positions = 0
        for row in pairs[:, 0].unique().tolist():
            columns, sources = pairs[pairs[:, 0] == row, 1:].unbind(1)
            at, which, counts = columns.unique(return_inverse=True, return_counts=True)
            q = query[row, list(heads)][:, at]  # [guided heads, positions, head_dim]
            scores = q @ key[row, list(heads)].transpose(-1, -2) * query.shape[-1] ** -0.5
            future = torch.arange(key.shape[2])[None, :] > at[:, None]
            log_p = scores.masked_fill(future, -torch.inf).log_softmax(-1)
            loss = loss - (log_p[:, which, sources] / counts[which]).sum() / len(heads)
            num_positions += len(at)
        total = total + loss / num_positions
    return total


def answer_loss(
    model: LlamaForCausalLM, hidden: torch.Tensor, batch: TrainingBatch
) -> tuple[torch.Tensor, float]:
    """Cross-entropy averaged over answers and, in each, its tokens; share of answers all right."""
    targets = torch.from_numpy(batch.targets)
    logits = model.lm_head(hidden[torch.from_numpy(batch.rows), torch.from_numpy(batch.columns)])
    right = logits.detach().argmax(-1) == targets
    ends = np.flatnonzero(batch.ends).tolist()
    starts = [0, *(end + 1 for end in ends[:-1])]
    whole = [bool(right[a : b + 1].all()) for a, b in zip(starts, ends, strict=True)]
    losses = F.cross_entropy(logits, targets, reduction="none")
    lengths = [b + 1 - a for a, b in zip(starts, ends, strict=True)]
    of_answers = torch.stack([part.mean() for part in losses[: sum(lengths)].split(lengths)])
    return of_answers.mean(), sum(whole) / max(1, len(whole))
