"""Refuses, by name and before weights are read, configs of models that cannot be served."""

from __future__ import annotations

from typing import Any

from gemserve.errors import ModelError, shown
from gemserve.model.families.reach import TOKENWISE_LAYERS

STATE_LAYERS = ("conv", "linear_attention", "hybrid", "hybrid_sliding")
_SERVED_LAYERS = (
    "full_attention",
    "sliding_attention",
    "chunked_attention",
    *STATE_LAYERS,
    *TOKENWISE_LAYERS,
)
# types of layers that choose by themselves which tokens they see
_CHOOSING = ("indexed_attention", "compressed_sparse_attention", "heavily_compressed_attention")
# what would otherwise be told by a setting that the config lacks
_KNOWN = {
    "blt": "they cut bytes into patches by a model of their own, and are no single stack of layers",
    "cpmant": "they add to each score a number by the distance of its tokens, which the attention "
    "function is not told",
    "recurrent_gemma": "their layers keep the state of one sequence in the model itself, and not "
    "in transformers' cache, so sequences cannot take turns",
}
_NEEDED = ("num_hidden_layers", "num_attention_heads", "hidden_size", "vocab_size")


def check_config(config: Any) -> None:
    """Raise `ModelError` with the reason if no model of this config can be served."""
    has_model = _has_causal_model(config)
    config = _served_part(config)
    kind = f"models of type {config.model_type!r} cannot be served"
    if config.model_type in _KNOWN:
        raise ModelError(f"{kind}: {_KNOWN[config.model_type]}")
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError(f"{kind}: they have an encoder, and only decoders are served")
    missing = [name for name in _NEEDED if not isinstance(_find(config, name), int)]
    if missing and _find(config, "text_config") is not None:
        raise ModelError(
            f"{kind}: they are multimodal, and transformers has no causal language model for the "
            "text part alone"
        )
    if not has_model:
        raise ModelError(f"{kind}: transformers has no causal language model of that type")
    if missing:
        reason = f"their config has no {missing[0]}"
        if missing[0] == "num_attention_heads":
            reason = (
                "they have no attention, and it is by a layer's queries and keys that a filter "
                "chooses, and of keys that gemserve's memory and document cache are made"
            )
        raise ModelError(f"{kind}: {reason}")
    for name in _NEEDED:
        if getattr(config, name) < 1:
            raise ModelError(f"{kind}: {name}={getattr(config, name)}: must be at least 1")
    if _has_alibi(config):
        raise ModelError(
            f"{kind}: ALiBi adds to each score a number by the distance of its tokens, which the "
            "attention function is not told"
        )
    if not isinstance(_find(config, "max_position_embeddings"), int):
        raise ModelError(
            f"{kind}: their config has no max_position_embeddings, which bounds a prompt"
        )
    others = sorted(set(_find(config, "layer_types") or ()) - set(_SERVED_LAYERS))
    if others:
        reason = f"must be one of {', '.join(_SERVED_LAYERS)}"
        if others[0] in _CHOOSING:
            reason = (
                "they choose by an index of their own which tokens they see, and served are layers "
                "that see all tokens, a sliding window, or chunks"
            )
        raise ModelError(f"{kind}: there are layers of type {shown(others[0])}; {reason}")


def _has_alibi(config: Any) -> bool:
    """Whether positions count by a bias for each distance (BLOOM, MPT, and some of Falcon's)."""
    if config.model_type == "bloom":
        return True
    return any(getattr(part, "alibi", False) for part in (config, _find(config, "attn_config")))


def _served_part(config: Any) -> Any:
    """The text model's config, if transformers makes a model of that part only."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    made = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    text = getattr(config, "text_config", None)
    return text if made is not None and made.config_class is type(text) else config


def _has_causal_model(config: Any) -> bool:
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    own_code = getattr(config, "auto_map", None) or {}  # for `trust_remote_code`
    return type(config) in MODEL_FOR_CAUSAL_LM_MAPPING or "AutoModelForCausalLM" in own_code


def _find(config: Any, name: str) -> Any:
    """The setting, or None. Some configs raise errors of their own for what layers differ in."""
    try:
        return getattr(config, name, None)
    except RuntimeError as error:
        raise ModelError(
            f"models of type {config.model_type!r} cannot be served: layers differ in {name}, and "
            "must have it in common"
        ) from error


def find_context_tokens(config: Any) -> int:
    """Tokens of the model's context.

    YaRN in the form of model cards has a factor, and leaves `max_position_embeddings` as it is.
    """
    stated: int = config.max_position_embeddings
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "yarn":
        return stated
    original = rope.get("original_max_position_embeddings") or stated
    return max(stated, int(original * (rope.get("factor") or 1.0)))
