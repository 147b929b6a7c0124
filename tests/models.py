"""Tiny random-weight models of every architecture served, as checkpoints on disk."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    OPTConfig,
    Phi3Config,
    Qwen2Config,
    Qwen3Config,
)

from gemserve.model.loading.loader import BUILTIN_PATH

VOCAB = 4096
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
LONGROPE_SWITCH = 192


def config(name: str) -> Any:
    if name == "llama":
        return LlamaConfig(**SIZES)
    if name == "mistral":
        return MistralConfig(**SIZES, sliding_window=None)
    if name == "mistral-window":
        return MistralConfig(**SIZES, sliding_window=100)
    if name == "qwen2":
        return Qwen2Config(**SIZES)
    if name == "qwen2-window":
        windowed = ["sliding_attention", "sliding_attention", "full_attention", "full_attention"]
        return Qwen2Config(
            **SIZES, use_sliding_window=True, sliding_window=100, layer_types=windowed
        )
    if name == "qwen3":
        return Qwen3Config(**SIZES, head_dim=16)
    if name == "phi3-longrope":
        half = 64 // 4 // 2
        return Phi3Config(
            **SIZES,
            original_max_position_embeddings=LONGROPE_SWITCH,
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "short_factor": [1.0 + 0.05 * i for i in range(half)],
                "long_factor": [1.5 + 0.8 * i for i in range(half)],
                "original_max_position_embeddings": LONGROPE_SWITCH,
            },
        )
    if name == "llama-dynamic":
        sizes = {**SIZES, "max_position_embeddings": 256}
        rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}
        return LlamaConfig(**sizes, rope_parameters=rope)
    assert name == "opt"
    return OPTConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        word_embed_proj_dim=64,
        ffn_dim=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=2048,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )


ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3", "phi3-longrope", "opt")


def build(name: str, seed: int = 0, scale: float = 3.0) -> Any:
    """A random model whose attention is far from uniform, so that mistakes show."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config(name), dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.mul_(scale)
    return model


def save(name: str, directory: Path, seed: int = 0) -> Path:
    """Write a checkpoint that `from_pretrained` loads, with the built-in model's tokenizer."""
    from transformers import AutoTokenizer

    build(name, seed).save_pretrained(directory)
    AutoTokenizer.from_pretrained(BUILTIN_PATH).save_pretrained(directory)
    return directory
