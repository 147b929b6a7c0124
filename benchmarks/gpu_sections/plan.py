"""Which sections there are, how long each may take, and how large its problems are. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# Shares of the time there is. What a section leaves goes to those after it.
SECTIONS: dict[str, float] = {
    "environment": 5,
    "ceilings": 15,
    "kernels": 75,
    "rates": 40,
    "model": 20,
    "chunks": 20,
    "attention": 50,
    "ttft": 180,
    "decode": 70,
    "throughput": 60,
}
# Run whichever are asked for: others need what they find.
ALWAYS = ("environment", "ceilings")
WITHOUT_MODEL = frozenset({*ALWAYS, "kernels", "rates"})

_LLAMA_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """Sizes of everything measured. Lengths are in tokens.

    `model`: of a `LlamaConfig`. `rounds`: how often every contestant is timed, at most. `repeats`:
    of a single operation. `kernel_tokens`: of the kernels' rates; `far_rows`: of a memory whose
    last rows are beyond 32 bits.
    """

    model: dict[str, Any]
    filter_layer: int
    keep: int
    lengths: tuple[int, ...]
    new_tokens: int
    rounds: int
    repeats: int
    warm_up_tokens: int
    copy_bytes: int
    matmul_size: int
    kernel_tokens: int
    far_rows: int
    chunk_sizes: tuple[int, ...]
    chunk_length: int
    attention_lengths: tuple[int, ...]
    sequences: tuple[int, ...]
    sequence_tokens: int
    decode_steps: int
    served_tokens: int
    served_requests: int
    served_at_once: int
    served_new_tokens: int


FULL = Scale(
    model={  # Llama-3.1-8B, with room for an answer after 131,072 tokens
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072 + 4096,
        "rope_parameters": _LLAMA_ROPE,
    },
    filter_layer=13,
    keep=1024,
    lengths=(8192, 32768, 65536, 131072),
    new_tokens=50,
    rounds=3,
    repeats=10,
    warm_up_tokens=4096,
    copy_bytes=2 << 30,
    matmul_size=8192,
    kernel_tokens=131072,
    far_rows=(1 << 24) + 4096,  # of 128 numbers: 2^31 and some
    chunk_sizes=(2048, 4096, 8192, 16384),
    chunk_length=32768,
    attention_lengths=(32768, 131072),
    sequences=(1, 4, 16, 64, 256),
    sequence_tokens=1024,
    decode_steps=32,
    served_tokens=16384,
    served_requests=24,
    served_at_once=12,
    served_new_tokens=64,
)

SMOKE = Scale(
    model={
        "vocab_size": 256,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1024,
        "rope_parameters": _LLAMA_ROPE | {"original_max_position_embeddings": 128},
    },
    filter_layer=1,
    keep=32,
    lengths=(96, 192),
    new_tokens=4,
    rounds=2,
    repeats=2,
    warm_up_tokens=64,
    copy_bytes=1 << 20,
    matmul_size=64,
    kernel_tokens=160,
    far_rows=64,
    chunk_sizes=(128, 256),
    chunk_length=192,
    attention_lengths=(64, 192),
    sequences=(1, 3),
    sequence_tokens=24,
    decode_steps=3,
    served_tokens=96,
    served_requests=3,
    served_at_once=2,
    served_new_tokens=3,
)
