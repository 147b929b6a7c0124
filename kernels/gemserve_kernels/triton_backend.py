"""The backend of gemserve's own Triton kernels. Importing it needs triton."""

from __future__ import annotations

from gemserve_kernels import (
    attention_scores,
    triton_attention_scores,
    triton_decode,
    triton_kv_copy,
    triton_ntk,
    triton_pooling,
)
from gemserve_kernels.backends import Backend


class TritonBackend(Backend):
    """Triton kernels on CUDA, but for attention; docs/benchmarks.md has speeds."""

    kernels = "triton"
    is_recordable = True

    decode = staticmethod(triton_decode.decode_attention)
    write = staticmethod(triton_kv_copy.write_tokens)
    gather = staticmethod(triton_kv_copy.gather_tokens)
    merge_ntk = staticmethod(triton_ntk.merge_ntk)
    largest_attention = staticmethod(triton_attention_scores.largest_attention)
    attention_beside_sinks = staticmethod(attention_scores.attention_of_all_heads_beside_sinks)
    grouped_probabilities = staticmethod(triton_attention_scores.grouped_probabilities)
    pooled = staticmethod(triton_pooling.pooled)
