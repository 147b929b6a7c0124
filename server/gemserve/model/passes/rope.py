"""Rotary embeddings that are fixed for each request.

transformers picks longrope's factors and dynamic scaling's base from the largest position in each
forward call, and writes them to the module. With chunked prefill that rotates the first chunks
differently from the last, and requests change each other's results. Here a pass's final length
decides once, and the pass runs with its own shallow copy of the rotary module.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gemserve.errors import ModelError

LENGTH_DEPENDENT = ("dynamic", "longrope")
_MSCALES = {"long_mscale", "short_mscale"}  # PhiMoE's settings


class RotaryFactory:
    """Makes the rotary module of one forward pass if a model's rope depends on length."""

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
        config = getattr(rotary, "config", None)
        self._parameters: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
        is_longrope = "longrope" in kinds
        self.switch: int | None = (
            self._parameters["original_max_position_embeddings"] if is_longrope else None
        )
        self._frequencies = lru_cache(maxsize=4096)(self._compute)

    def replacement(self, lengths: Sequence[int]) -> dict[str, nn.Module]:
        """The replacement for the decoder's `rotary_emb`, if rope depends on length.

        `lengths`: final lengths of the pass's sequences: one for the whole pass, or one a row.
        """
        if self.is_fixed:
            return {}
        fixed = copy.copy(self._rotary)
        fixed._buffers = dict(self._rotary._buffers)
        fixed.rope_type = "default"  # transformers updates only other types in every forward call
        if self._parameters.keys() >= _MSCALES:
            fixed = TableRotary()
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
        if self._parameters.keys() >= _MSCALES:
            is_long = num_tokens > self._parameters["original_max_position_embeddings"]
            scaling = self._parameters["long_mscale" if is_long else "short_mscale"]
        return frequencies, scaling


class TableRotary(nn.Module):
    """The rotary embedding of PhiMoE with frequencies and a scale that are given.

    transformers' own takes neither: it computes the short frequencies in every call, and takes the
    scale from the largest position of all rows. The model's authors use the long ones beyond the
    original context, as Phi-3 does.
    """

    inv_freq: torch.Tensor
    attention_scaling: Any

    def forward(
        self, hidden: torch.Tensor, position_ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        angles = position_ids[..., None].float() * self.inv_freq.to(hidden.device)
        both = torch.cat([angles, angles], dim=-1)
        cos, sin = (f(both) * self.attention_scaling for f in (torch.cos, torch.sin))
        return cos.to(hidden.dtype), sin.to(hidden.dtype)


class KeyRotation:
    """Moves keys that RoPE has rotated to other positions."""

    def __init__(self, rotate: Any, rotary: Any, layer_type: str | None) -> None:
        self._rotate, self._rotary, self._layer_type = rotate, rotary, layer_type

    @torch.inference_mode()
    def moved(self, keys: torch.Tensor, shifts: torch.Tensor) -> torch.Tensor:
        """Keys [heads, tokens, head_dim] as if each stood `shifts` positions further on.

        `shifts`: [tokens]. The result is float32.
        """
        wide = keys.float()
        extra = () if self._layer_type is None else (self._layer_type,)
        cos, sin = self._rotary(wide, shifts[None], *extra)  # [1, tokens, rotated]
        size = cos.shape[-1]
        # the first rotation has already applied the model's scaling
        length = torch.sqrt(cos[0, 0, 0] ** 2 + sin[0, 0, 0] ** 2)
        part = wide[None, ..., :size]
        turned, _ = self._rotate(part, part, cos / length, sin / length)
        return torch.cat([turned[0], wide[..., size:]], dim=-1)


def find_key_rotation(attention: Any, rotary: Any, layer_type: str | None) -> KeyRotation | None:
    """How transformers rotates the keys of an attention module. None if unknown."""
    rotate = getattr(sys.modules[type(attention).__module__], "apply_rotary_pos_emb", None)
    if rotate is None or rotary is None:
        return None
    takes_type = "layer_type" in inspect.signature(rotary.forward).parameters
    return KeyRotation(rotate, rotary, layer_type if takes_type else None)
