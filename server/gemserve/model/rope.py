"""Rotary embeddings fixed per request.

transformers picks longrope's factors and dynamic scaling's base from the largest position in each
forward call and writes them to the module. Under chunked prefill that rotates the first chunks
with one set and the last with another, and neighbours change each other's results. Here a pass's
length decides once, and the pass runs with its own shallow copy of the rotary module.
"""

from __future__ import annotations

import copy
from typing import Any

from torch import nn
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gemserve.errors import ModelError

LENGTH_DEPENDENT = ("dynamic", "longrope")


def rope_types(rotary: nn.Module) -> set[str]:
    """The rope types in use; models with several kinds of layer may have several."""
    types: Any = getattr(rotary, "rope_type", "default")
    return set(types.values()) if isinstance(types, dict) else {str(types)}


def is_length_dependent(rotary: nn.Module) -> bool:
    return any(kind in LENGTH_DEPENDENT for kind in rope_types(rotary))


def fixed_rotary(rotary: Any, num_tokens: int) -> Any:
    """`rotary` with frequencies fixed for a sequence of `num_tokens`, sharing nothing mutable."""
    if isinstance(rotary.rope_type, dict):
        raise ModelError(
            f"{type(rotary).__name__} mixes rope types {sorted(rope_types(rotary))} by layer, one "
            "of them dependent on length"
        )
    init = ROPE_INIT_FUNCTIONS[rotary.rope_type]
    frequencies, scaling = init(rotary.config, rotary.inv_freq.device, seq_len=num_tokens)
    fixed = copy.copy(rotary)
    fixed._buffers = dict(rotary._buffers)
    fixed.inv_freq = frequencies
    fixed.attention_scaling = scaling
    fixed.rope_type = "default"  # transformers' own update on every forward is for other types
    return fixed
