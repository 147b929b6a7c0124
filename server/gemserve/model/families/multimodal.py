"""The text model in a multimodal checkpoint: its config, and the names of its tensors.

Only families are served whose text model alone gives the logits that the whole model gives for
text. PaliGemma's prompt sees itself in both directions, and the vision models of Cohere leave out
the factor of their text model's logits: both would be served wrong without a word.
"""

from __future__ import annotations

from typing import Any

from gemserve.errors import ModelError, shown

# beside those that transformers itself has as causal language models, such as Gemma 3
TEXT_IS_THE_SAME = (
    "aria",
    "cohere_compass",
    "deepseek_vl",
    "deepseek_vl_hybrid",
    "exaone4_5",
    "glm4v",
    "glm4v_moe",
    "hyperclovax_vision_v2",
    "idefics2",
    "idefics3",
    "internvl",
    "janus",
    "lfm2_vl",
    "lfm3_vl",
    "lighton_ocr",
    "llava",
    "llava_next",
    "llava_next_video",
    "llava_onevision",
    "minicpm_ocr",
    "minicpmv4_6",
    "minicpmv4_7",
    "mistral3",
    "ovis2",
    "pp_chart2table",
    "qwen2_5_vl",
    "qwen2_vl",
    "qwen3_vl",
    "smolvlm",
    "video_llama_3",
    "video_llava",
    "vipllava",
)
# Text has the same position on all three axes of their rotary embeddings, which is what these
# models compute.
_AS_CAUSAL = {
    "glm4v_text": "glm4",
    "glm4v_moe_text": "glm4_moe",
    "qwen2_vl_text": "qwen2",
    "qwen2_5_vl_text": "qwen2",
    "qwen3_vl_text": "qwen3",
}
# they have the config of a text model in theirs, too
_DRAFTS = ("gemma4_assistant", "gemma4_unified_assistant")
# patterns of names in the checkpoint, and what stands there in the text model's own
TEXT_NAMES = {
    r"^(?:model\.)?language_model\.lm_head\.": "lm_head.",
    r"^(?:model\.)?language_model\.(?:model\.)?": "model.",
    r"^(?:model\.)?text_model\.": "model.",
}


def text_config(config: Any) -> Any:
    """The config of the text model in a multimodal one; otherwise it is the config itself.

    Raises `ModelError` if the text model alone would not answer as the whole does.
    """
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if config.model_type in _DRAFTS:
        raise ModelError(
            f"models of type {shown(config.model_type)} cannot be served: they draft tokens for "
            "another model, and read its keys; serve that model"
        )
    text = getattr(config, "text_config", None)
    has_part = type(text) in MODEL_FOR_CAUSAL_LM_MAPPING
    is_same = config.model_type in TEXT_IS_THE_SAME
    if has_part and not is_same and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise ModelError(
            f"models of type {shown(config.model_type)} cannot be served: they are multimodal, and "
            "their text model alone is not known to answer as the whole does; such models that are "
            f"served: {', '.join(TEXT_IS_THE_SAME)}"
        )
    if is_same and getattr(text, "model_type", None) in _AS_CAUSAL:
        text, has_part = _as_causal(text), True
    if not has_part or text is None:
        return config
    for name in ("dtype", "quantization_config"):
        if getattr(text, name, None) is None and getattr(config, name, None) is not None:
            setattr(text, name, getattr(config, name))
    # transformers ties them by the whole's setting, whatever the part's is
    text.tie_word_embeddings = getattr(config, "tie_word_embeddings", text.tie_word_embeddings)
    return text


def _as_causal(text: Any) -> Any:
    from transformers import CONFIG_MAPPING

    settings = {k: v for k, v in text.to_dict().items() if k != "model_type"}
    rope = settings.get("rope_parameters") or {}
    if settings.get("head_dim") is None:
        settings["head_dim"] = text.hidden_size // text.num_attention_heads
    left_out = ("type", "mrope_section", "mrope_interleaved")
    settings["rope_parameters"] = {k: v for k, v in rope.items() if k not in left_out}
    return CONFIG_MAPPING[_AS_CAUSAL[text.model_type]](**settings)
