"""Tensor operations of gemserve. They take and return tensors, and know no model or server.

The functions named here are plain torch and run anywhere. The `triton_…` modules hold twins with
the same names and signatures. They need triton, so only `select_backend` imports them, on CUDA.
"""

from gemserve_kernels.attention import Partial, join, merge
from gemserve_kernels.attention_scores import (
    grouped_probabilities,
    largest_attention,
    pooled,
    raw_scores,
)
from gemserve_kernels.backends import Backend, select_backend
from gemserve_kernels.decode import decode_attention
from gemserve_kernels.kv_copy import gather_tokens, write_tokens
from gemserve_kernels.kv_table import KVTable
from gemserve_kernels.ntk import merge_ntk, ntk_features, ntk_part

__all__ = [
    "Backend",
    "KVTable",
    "Partial",
    "decode_attention",
    "gather_tokens",
    "grouped_probabilities",
    "join",
    "largest_attention",
    "merge",
    "merge_ntk",
    "ntk_features",
    "ntk_part",
    "pooled",
    "raw_scores",
    "select_backend",
    "write_tokens",
]
