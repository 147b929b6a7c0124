"""Tensor operations of gemserve: tensors in, tensors out; no model, no server."""

from gemserve_kernels.attention import AttentionBackend, Partial, merge
from gemserve_kernels.backends import select_backend
from gemserve_kernels.ntk import ntk_features, ntk_part
from gemserve_kernels.scores import (
    WindowAttention,
    grouped_probabilities,
    pooled,
    raw_scores,
    window_attention,
)

__all__ = [
    "AttentionBackend",
    "Partial",
    "WindowAttention",
    "grouped_probabilities",
    "merge",
    "ntk_features",
    "ntk_part",
    "pooled",
    "raw_scores",
    "select_backend",
    "window_attention",
]
