"""Tiny random models of every family that transformers' `AutoModelForCausalLM` can build."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from gemserve.model.families.multimodal import text_config

WINDOW = 72  # of every sliding window, and the size of chunks
VOCAB = 160
# what a config is given if it has such a setting
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "vocab_size_per_layer_input": VOCAB,
    "hidden_size": 64,
    "d_model": 64,
    "embedding_size": 64,
    "intermediate_size": 96,
    "intermediate_size_mlp": 96,
    "ffn_dim": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "global_head_dim": 16,
    "rotary_dim": 8,
    "max_position_embeddings": 512,
    "sliding_window": WINDOW,
    "attention_chunk_size": WINDOW,
    "hidden_size_per_layer_input": 8,
    "num_experts": 4,
    "num_local_experts": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "word_embed_proj_dim": 64,
    "encoder_layers": 2,
    "decoder_layers": 4,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 96,
    "decoder_ffn_dim": 96,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "mamba_chunk_size": 32,
    "ssm_state_size": 8,
    "n_groups": 2,
    "mamba_d_state": 8,
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_ssm": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
# where that is not enough to build a model, or would leave out what makes the family special
OVERRIDES: dict[str, dict[str, Any]] = {
    "llama4_text": {"floor_scale": 40, "attn_scale": 0.3},
    "qwen2": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen2_moe": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3": {"use_sliding_window": True, "max_window_layers": 2},
    "qwen3_moe": {"use_sliding_window": True, "max_window_layers": 2},
    "phimoe": {
        "rope_parameters": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0 + 0.05 * i for i in range(8)],
            "long_factor": [1.5 + 0.8 * i for i in range(8)],
            "short_mscale": 1.1,
            "long_mscale": 1.3,
            "original_max_position_embeddings": 256,
        }
    },
    "dots1": {"layer_types": ["full_attention"] * 4, "n_shared_experts": 1},
    "falcon": {"alibi": False},
    "gpt_neo": {"num_layers": 4, "attention_types": [[["global", "local"], 2]]},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "zaya": {"num_experts_per_tok": 1},
    "bamba": {"attn_layer_indices": [1, 3]},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "nemotron_h": {
        "layers_block_type": ["linear_attention", "full_attention", "moe", "full_attention"],
        "chunk_size": 32,
        "moe_shared_expert_intermediate_size": 32,
    },
    "olmo_hybrid": {"layer_types": ["linear_attention", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "phi4_multimodal": {
        "vision_config": {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1},
        "audio_config": {"hidden_size": 32, "intermediate_size": 32, "num_blocks": 1},
    },
    "laguna": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "mellum": {"layer_types": ["sliding_attention", "full_attention"] * 2},
    "reformer": {"is_decoder": True, "axial_pos_embds": False},
    "xlnet": {"n_layer": 4, "n_head": 4},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "num_key_value_heads": 4,
        "use_shared_attention_adapter": True,
        "adapter_rank": 4,
        "use_mem_rope": True,
        "chunk_size": 32,
    },
    "minimax": {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "block_size": 32,
        "sliding_window": None,
    },
    "gemma3n_text": {
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 10000.0, "clip_qkv": 1.0},
        "ffn_config": {"ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
}
# settings that the family takes no value for
WITHOUT = {
    "falcon": {"head_dim"},
    "xlstm": {"v_head_dim"},
    "prophetnet": {"num_hidden_layers"},
    "xlnet": {"max_position_embeddings", "num_hidden_layers"},
    "zamba": {"head_dim"},
    "zamba2": {"head_dim"},
    "dots3_note_text": {"num_attention_heads", "num_key_value_heads"},
}
# layers that see all tokens have fewer and larger heads and values made of keys; the upper half has
# the keys and values of lower layers
_GEMMA4 = {
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "head_dim": 16,
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "num_kv_shared_layers": 2,
}
OVERRIDES["gemma4_text"] = _GEMMA4
# multi-head latent attention: keys and values of all heads come from one vector
_MLA = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "minicpm3", "youtu")
for _family in _MLA:
    OVERRIDES[_family] = {"num_key_value_heads": 4}
    WITHOUT[_family] = {"head_dim"}
for _family in ("kimi_linear", "bailing_hybrid"):
    OVERRIDES[_family] = {
        "layer_types": ["linear_attention", "full_attention"] * 2,
        "num_key_value_heads": 4,
    }
_HALF_WINDOWED = ("gemma3_text", "gemma2", "olmo3", "exaone4", "cohere2", "afmoe", "gpt_oss")
for _family in _HALF_WINDOWED:
    OVERRIDES[_family] = {"layer_types": ["sliding_attention", "full_attention"] * 2}
for _family in ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"):
    OVERRIDES[_family] = {"layer_types": ["linear_attention", "full_attention"] * 2}


_DRAFT = {
    "model_type": "gemma4_text",
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": 30,
}
# refused by their config, so their size does not count
UNSIZED: dict[str, dict[str, Any]] = {
    "dots3_note": {},
    "gemma4_assistant": {"text_config": _DRAFT},
    "gemma4_unified_assistant": {},
}


class CannotBuild(Exception):
    """transformers does not build this family with small sizes."""


def all_families() -> list[str]:
    return sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(family: str, **changes: Any) -> Any:
    """A config of that family with small sizes."""
    kind = CONFIG_MAPPING[family]
    with _building():
        if family in UNSIZED:
            return kind(**UNSIZED[family])
        return _sized(family, kind, kind(), changes)


@contextmanager
def _building() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # transformers' configs and models raise errors of many kinds
        message = " ".join(str(error).split())[:160]
        raise CannotBuild(f"{type(error).__name__}: {message}") from error


def _sized(family: str, kind: Any, default: Any, changes: dict[str, Any]) -> Any:
    without = WITHOUT.get(family, set())
    sizes = {k: v for k, v in SIZES.items() if k not in without and _has(default, k)}
    if getattr(default, "text_config", None) is not None:
        inner = type(default.text_config)
        text = default.text_config
        sizes["text_config"] = inner(
            **{k: v for k, v in SIZES.items() if _has(text, k)}
            | OVERRIDES.get(inner.model_type, {})
        ).to_dict()
    return kind(**{**sizes, **OVERRIDES.get(family, {}), **changes})


def _has(config: Any, name: str) -> bool:
    try:
        return hasattr(config, name) or name in config.attribute_map
    except RuntimeError:  # it is for a setting that layers differ in
        return True


def served_config(family: str, **changes: Any) -> Any:
    """What a checkpoint of that family is served by: see `text_config`."""
    return text_config(tiny_config(family, **changes))


def build(family: str, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any) -> Any:
    """A random model whose attention is far from uniform, so that mistakes show."""
    torch.manual_seed(seed)
    config = served_config(family, **changes)
    with _building():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2:
                parameter.mul_(3.0)
            elif "bias" in name:
                parameter.normal_(std=0.3)
            elif "sink" in name:  # as heavy as many keys
                parameter.normal_(mean=3.0)
            elif name.endswith(".temp"):  # a factor of all keys, which is 0 at first
                parameter.normal_(mean=1.0, std=0.3)
            elif not parameter.any():  # it would turn off what it scales, as Gemma 3n's inputs
                parameter.normal_(std=0.3)
    return model.eval().to(dtype)
