"""Tiny GGUF files, written from random models the way that llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, GGUFWriter, get_tensor_name_map, quants
from gguf.constants import MODEL_ARCH_NAMES

from gemserve.model.loader import BUILTIN_PATH
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
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(getattr(config, "head_dim", None) or 16)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters.get("rope_theta", 1e6))
    writer.add_vocab_size(config.vocab_size)
    if has_tokenizer:
        _add_tokenizer(writer, config.vocab_size)
    if template is not None:
        writer.add_chat_template(template)
    if change is not None:
        change(writer)
    known = next((key for key, name in MODEL_ARCH_NAMES.items() if name == architecture), None)
    if known is not None:
        _add_tensors(writer, model, get_tensor_name_map(known, 8), kind, leave_out)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, vocab_size: int) -> None:
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
        base, _, suffix = full.rpartition(".")
        values = parameter.numpy()
        if config.model_type == "llama" and ("q_proj" in base or "k_proj" in base):
            heads = config.num_attention_heads if "q_proj" in base else config.num_key_value_heads
            split = values.reshape(heads, 2, values.shape[0] // heads // 2, -1)
            values = np.ascontiguousarray(split.swapaxes(1, 2).reshape(values.shape))
        if config.model_type == "gemma3_text" and "norm" in base:
            values = values + 1
        name = f"{names.get_name(base)}.{suffix}"
        if name == leave_out:
            continue
        if values.ndim == 1 or kind == GGMLQuantizationType.F32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, quants.quantize(values, kind), raw_dtype=kind)


def save(name: str, path: Path, **options: Any) -> Path:
    return write(path, models.build(name), architecture=name, **options)
