"""Families that are read from GGUF files, and their settings by the names of llama.cpp.

transformers has such a table, too. It leaves out settings of several families, whose models would
then be computed by other numbers than they were trained with: the RoPE base of StarCoder2, the
share of each head that rotates and the window of Phi-3, the sizes of experts (Qwen2-MoE,
Qwen3-MoE), and the scale and caps of attention in Gemma 2 and 3.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gemserve.errors import ModelError, shown
from gemserve.model.loading.gguf_file import GgufFile

_COMMON = {
    "context_length": "max_position_embeddings",
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "vocab_size": "vocab_size",
}
_RMS = {"attention.layer_norm_rms_epsilon": "rms_norm_eps"}
_HEAD = {"attention.key_length": "head_dim"}
_WINDOW = {"attention.sliding_window": "sliding_window"}
_EXPERTS = {
    "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
}
# settings that are not read, and the values by which each changes nothing
_UNREAD = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0.0,),
    "attention.max_alibi_bias": (0.0,),
    "attention.scale": (0.0,),
    "embedding_scale": (1.0,),
    "logit_scale": (1.0,),
    "residual_scale": (1.0,),
    "rope.scaling.alpha": (0.0,),
    "rope.scaling.yarn_attn_factor": (1.0,),
    "rope.scaling.yarn_beta_fast": (32.0,),
    "rope.scaling.yarn_beta_slow": (1.0,),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),  # -1 stands for YaRN's own, which is 1
    "rope.scaling.yarn_log_multiplier": (0.0,),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GGUFFamily:
    """How an architecture of GGUF files becomes a config of transformers.

    `names`: settings of this family by their names in the file, beside those that all have.
    `fixed`: settings that no file has. `rotates_partly`: `rope.dimension_count` may be less than
    the size of a head. `layers_with_scale`: in a model of that many layers, attention is scaled by
    the hidden size over the heads, as Gemma 2 and 3 of 27 billion parameters are; 0: in none.
    """

    model_type: str
    names: dict[str, str]
    fixed: dict[str, Any] = field(default_factory=dict)
    rotates_partly: bool = False
    layers_with_scale: int = 0


FAMILIES = {
    "gemma2": GGUFFamily(
        model_type="gemma2",
        names={
            **_RMS,
            **_HEAD,
            **_WINDOW,
            "attn_logit_softcapping": "attn_logit_softcapping",
            "final_logit_softcapping": "final_logit_softcapping",
        },
        layers_with_scale=46,
    ),
    "gemma3": GGUFFamily(
        model_type="gemma3_text", names={**_RMS, **_HEAD, **_WINDOW}, layers_with_scale=62
    ),
    "llama": GGUFFamily(model_type="llama", names={**_RMS, **_HEAD}),
    "phi3": GGUFFamily(model_type="phi3", names={**_RMS, **_WINDOW}, rotates_partly=True),
    "qwen2": GGUFFamily(model_type="qwen2", names={**_RMS, **_HEAD}),
    "qwen2moe": GGUFFamily(
        model_type="qwen2_moe",
        names={
            **_RMS,
            **_EXPERTS,
            "expert_shared_feed_forward_length": "shared_expert_intermediate_size",
        },
    ),
    "qwen3": GGUFFamily(model_type="qwen3", names={**_RMS, **_HEAD}),
    "qwen3moe": GGUFFamily(
        model_type="qwen3_moe",
        names={**_RMS, **_HEAD, **_EXPERTS},
        fixed={"norm_topk_prob": True},  # as all published models of this family have it
    ),
    "starcoder2": GGUFFamily(
        model_type="starcoder2", names={"attention.layer_norm_epsilon": "norm_epsilon"}
    ),
}


def family_of(file: GgufFile) -> GGUFFamily:
    """Raises `ModelError` if files of this architecture are not read."""
    family = FAMILIES.get(file.architecture)
    if family is None:
        raise ModelError(
            f"{file.path}: GGUF files of architecture {shown(file.architecture)} are not read; "
            f"must be one of {', '.join(FAMILIES)}. Serve the model's own folder"
        )
    return family


def settings_of(file: GgufFile) -> dict[str, Any]:
    """Arguments for transformers' config of the file's family.

    Raises `ModelError` for settings that are not read and for ones that differ between layers.
    """
    family = family_of(file)
    settings = dict(family.fixed)
    for key, name in {**_COMMON, **family.names}.items():
        value = file.setting(key)
        if isinstance(value, list):
            raise ModelError(
                f"{file.path}: {file.architecture}.{key} differs between layers: "
                "must be one number for all"
            )
        if value is not None:
            settings[name] = value
    if settings.get("sliding_window") == 0:  # as Phi-4's files say that there is none
        settings["sliding_window"] = None
    for key, neutral in _UNREAD.items():
        value = file.setting(key)
        if value is not None and value not in neutral:
            raise ModelError(
                f"{file.path}: {file.architecture}.{key}={shown(value)} is not read from GGUF files"
            )
    settings["pad_token_id"] = None  # or some configs take one beyond the vocabulary
    for kind, name in (("bos", "bos"), ("eos", "eos"), ("unknown", "unk"), ("padding", "pad")):
        index = file.metadata.get(f"tokenizer.ggml.{kind}_token_id")
        if index is not None:
            settings[f"{name}_token_id"] = index
    settings["tie_word_embeddings"] = all(t.name != "output.weight" for t in file.tensors)
    settings.setdefault("vocab_size", len(file.metadata.get("tokenizer.ggml.tokens", ())))
    _set_rope(file, family, settings)
    if family.layers_with_scale:
        settings["query_pre_attn_scalar"] = _attention_scalar(family, settings)
    return settings


def _set_rope(file: GgufFile, family: GGUFFamily, settings: dict[str, Any]) -> None:
    theta, rotated = file.setting("rope.freq_base"), file.setting("rope.dimension_count")
    size = settings.get("head_dim")
    if size is None and file.architecture == "llama" and rotated is not None:
        size = settings["head_dim"] = rotated  # of files without a key length
    width, heads = settings.get("hidden_size"), settings.get("num_attention_heads")
    if size is None and isinstance(width, int) and isinstance(heads, int) and heads > 0:
        size = width // heads
    if family.rotates_partly:
        settings["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": 10000.0 if theta is None else theta,
            "partial_rotary_factor": 1.0 if not rotated or not size else rotated / size,
        }
        return
    if theta is not None:
        settings["rope_theta"] = theta
    if rotated is not None and size is not None and rotated != size:
        raise ModelError(
            f"{file.path}: {file.architecture}.rope.dimension_count={shown(rotated)}: must be the "
            f"size of a head, which is {size}"
        )


def _attention_scalar(family: GGUFFamily, settings: dict[str, Any]) -> int:
    """The number whose root divides scores. No file has it; this is llama.cpp's rule."""
    if settings["num_hidden_layers"] == family.layers_with_scale:
        return int(settings["hidden_size"] // settings["num_attention_heads"])
    return int(settings.get("head_dim", 256))
