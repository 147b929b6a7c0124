"""Rotary embeddings fixed per request.

transformers picks longrope's factors and dynamic scaling's base from the largest position in each
forward call and writes them to the module. Under chunked prefill that rotates the first chunks
with one set and the last with another, and neighbours change each other's results. Here a pass's
length decides once, and the pass runs with its own shallow copy of the rotary module.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gemserve.errors import ModelError

LENGTH_DEPENDENT = ("dynamic", "longrope")


class RotaryFactory:
    """Makes the rotary module of one forward pass, where a model's rope depends on length."""

    def __init__(self, rotary: Any) -> None:
        self._rotary = rotary
        kind: Any = getattr(rotary, "rope_type", "default")
        kinds = set(kind.values()) if isinstance(kind, dict) else {kind}
        self.is_fixed = rotary is None or not kinds & set(LENGTH_DEPENDENT)
        if not self.is_fixed and isinstance(kind, dict):
            raise ModelError(
                f"{type(rotary).__name__} mixes rope types {sorted(kinds)} by layer, one of them "
                "dependent on length"
            )
        self._frequencies = lru_cache(maxsize=4096)(self._compute)

    def replacement(self, lengths: Sequence[int]) -> dict[str, nn.Module]:
        """What to put in the decoder's place of `rotary_emb`: nothing, if rope is the same for all.

        `lengths`: final lengths of the pass's sequences; one for the whole pass, or one per row.
        """
        if self.is_fixed:
            return {}
        fixed = copy.copy(self._rotary)
        fixed._buffers = dict(self._rotary._buffers)
        fixed.rope_type = "default"  # transformers' own update on every forward is for other types
        if len(set(lengths)) == 1:
            fixed.inv_freq, fixed.attention_scaling = self._frequencies(lengths[0])
        else:
            rows = [self._frequencies(length) for length in lengths]
            # [1, rows, head_dim / 2]: the module multiplies positions with it element by element
            fixed.inv_freq = torch.stack([frequencies for frequencies, _ in rows])[None]
            scaling = torch.tensor([factor for _, factor in rows], device=fixed.inv_freq.device)
            fixed.attention_scaling = scaling[None, :, None]
        return {"rotary_emb": fixed}

    def _compute(self, num_tokens: int) -> tuple[torch.Tensor, float]:
        init = ROPE_INIT_FUNCTIONS[self._rotary.rope_type]
        frequencies, scaling = init(
            self._rotary.config, self._rotary.inv_freq.device, seq_len=num_tokens
        )
        return frequencies, scaling
