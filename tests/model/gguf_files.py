"""Tiny GGUF files, written from random models the way that llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from gguf.constants import MODEL_ARCH_NAMES

from gemserve.model.loading.gguf_families import FAMILIES
from gemserve.model.loading.loader import BUILTIN_PATH
from tests import models

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
Change = Callable[[GGUFWriter], None]


def write(
    path: Path,
    model: Any,
    *,
    architecture: str = "llama",
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    template: str | None = TEMPLATE,
    has_tokenizer: bool = True,
    change: Change | None = None,
    leave_out: str = "nothing",
) -> Path:
    """`model` as a GGUF file whose matrices have type `kind`."""
    config = model.config
    writer = GGUFWriter(str(path), architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    _add_settings(writer, config)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", None) or 16)
    writer.add_vocab_size(config.vocab_size)
    if has_tokenizer:
        add_tokenizer(writer, config.vocab_size)
    if template is not None:
        writer.add_chat_template(template)
    if change is not None:
        change(writer)
    known = next((key for key, name in MODEL_ARCH_NAMES.items() if name == architecture), None)
    if known is not None and architecture in FAMILIES:
        _add_tensors(
            writer, model, get_tensor_name_map(known, config.num_hidden_layers), kind, leave_out
        )
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_settings(writer: GGUFWriter, config: Any) -> None:
    """What only some families have, or have by several names."""
    if hasattr(config, "rms_norm_eps"):
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if hasattr(config, "norm_epsilon"):
        writer.add_layer_norm_eps(config.norm_epsilon)
    rope = config.rope_parameters
    writer.add_rope_freq_base(rope.get("rope_theta", 1e6))
    if "partial_rotary_factor" in rope:
        writer.add_rope_dimension_count(int(16 * rope["partial_rotary_factor"]))
    if config.model_type in ("gemma2", "phi3"):
        writer.add_sliding_window(config.sliding_window)
    if config.model_type == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if hasattr(config, "moe_intermediate_size"):
        writer.add_expert_count(config.num_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if hasattr(config, "shared_expert_intermediate_size"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def add_tokenizer(writer: GGUFWriter, vocab_size: int) -> None:
    """The built-in model's tokenizer; tokens it lacks are filled up."""
    described = json.loads((BUILTIN_PATH / "tokenizer.json").read_text())
    special = {token["content"] for token in described["added_tokens"]}
    vocab = {**described["model"]["vocab"]}
    vocab |= {token["content"]: token["id"] for token in described["added_tokens"]}
    by_id = {index: token for token, index in vocab.items()}
    tokens = [by_id.get(index, f"unused{index}") for index in range(vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token in special else 1 for token in tokens])
    merges = described["model"]["merges"]
    writer.add_token_merges([m if isinstance(m, str) else " ".join(m) for m in merges])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_eot_token_id(3)
    writer.add_add_bos_token(False)


def _add_tensors(
    writer: GGUFWriter, model: Any, names: Any, kind: GGMLQuantizationType, leave_out: str
) -> None:
    config = model.config
    for full, parameter in model.state_dict().items():
        if full == "lm_head.weight" and config.tie_word_embeddings:
            continue
        base, _, suffix = full.rpartition(".")
        values = parameter.numpy()
        if config.model_type == "llama" and ("q_proj" in base or "k_proj" in base):
            heads = config.num_attention_heads if "q_proj" in base else config.num_key_value_heads
            split = values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
            values = np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))
        if config.model_type in ("gemma2", "gemma3_text") and full.endswith("norm.weight"):
            values = values + 1
        for name, part in _in_file(full, names.get_name(base), suffix, values):
            if name == leave_out:
                continue
            if part.ndim == 1 or kind == GGMLQuantizationType.F32:
                writer.add_tensor(name, part)
            else:
                writer.add_tensor(name, quants.quantize(part, kind), raw_dtype=kind)


def _in_file(full: str, name: str, suffix: str, values: Any) -> list[tuple[str, Any]]:
    """The tensors of a parameter: three for the matrices of experts, which transformers merges."""
    layer = full.removeprefix("model.layers.").partition(".")[0]
    if full.endswith("experts.gate_up_proj"):
        gate, up = (np.ascontiguousarray(half) for half in np.split(values, 2, axis=1))
        return [
            (f"blk.{layer}.ffn_gate_exps.weight", gate),
            (f"blk.{layer}.ffn_up_exps.weight", up),
        ]
    if full.endswith("experts.down_proj"):
        return [(f"blk.{layer}.ffn_down_exps.weight", values)]
    if full.endswith("shared_expert_gate.weight"):
        return [(f"blk.{layer}.ffn_gate_inp_shexp.weight", values[0])]
    return [(f"{name}.{suffix}", values)]


def save(name: str, path: Path, **options: Any) -> Path:
    return write(path, models.build(name), architecture=name, **options)
