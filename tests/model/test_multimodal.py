"""The text model of a multimodal checkpoint answers as the whole does, or is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForImageTextToText, AutoTokenizer

from gemserve.config import ModelConfig
from gemserve.cost import filter_units
from gemserve.errors import ModelError
from gemserve.model.families.multimodal import TEXT_IS_THE_SAME
from gemserve.model.loading.loader import BUILTIN_PATH, load
from tests.architectures import families
from tests.architectures.page import PAGE
from tests.model.test_quantised import Fp8, rewrite

IDS = [5 + 7 * i % 150 for i in range(100)]
# sizes of vision models, by all the names that families have for them
VISION = {
    "hidden_size": 32,
    "embed_dim": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "depth": 1,
    "num_attention_heads": 2,
    "num_heads": 2,
    "image_size": 28,
    "patch_size": 14,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [0],
    "deepstack_visual_indexes": [0],
    "num_position_embeddings": 16,
}
TOKENS = ("image_token_id", "image_token_index", "video_token_id", "vision_start_token_id")
TOKENS += ("vision_end_token_id", "boi_token_index", "eoi_token_index")
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}


def tiny_config(family: str, **changes: Any) -> Any:
    kind = CONFIG_MAPPING[family]
    default = kind()
    sizes = {k: v for k, v in families.SIZES.items() if hasattr(default.text_config, k)}
    inner = type(default.text_config)
    if inner.model_type.startswith("qwen") and "vl" in inner.model_type:
        sizes["rope_parameters"] = MROPE
    if inner.model_type.startswith("glm4v"):
        sections = [1, 1, 2] if inner.model_type == "glm4v_moe_text" else [2, 3, 3]
        partial = sum(sections) / 8
        sizes["rope_parameters"] = MROPE | {
            "mrope_section": sections,
            "partial_rotary_factor": partial,
        }
    text = inner(**{**sizes, **families.OVERRIDES.get(inner.model_type, {})})
    vision = {k: v for k, v in VISION.items() if hasattr(default.vision_config, k)}
    return kind(
        text_config=text.to_dict(),
        vision_config={**vision, "model_type": default.vision_config.model_type},
        **{name: 3 for name in TOKENS if hasattr(default, name)},
        **changes,
    )


def saved(family: str, folder: Path, **changes: Any) -> Any:
    """The whole model, which is also in the folder."""
    torch.manual_seed(0)
    whole = AutoModelForImageTextToText.from_config(tiny_config(family, **changes)).float().eval()
    with torch.no_grad():
        for parameter in whole.parameters():
            if parameter.dim() >= 2:
                parameter.mul_(3.0)
    whole.save_pretrained(folder)
    AutoTokenizer.from_pretrained(BUILTIN_PATH).save_pretrained(folder)
    return whole


def logits_of(folder: Path) -> torch.Tensor:
    model = load(ModelConfig(model=str(folder), device="cpu", dtype="float32")).model
    kv = model.new_memory(filter_units(model.num_layers) * 128).kv(
        0, num_layers=model.num_layers, capacity=128
    )
    out = model.prefill_chunk(IDS, start=0, kv=kv, rope_tokens=128, is_last=True, is_scored=True)
    assert out is not None
    return out


def expected(whole: Any) -> torch.Tensor:
    with torch.inference_mode():
        return whole(input_ids=torch.tensor([IDS]), use_cache=False).logits[0]


@pytest.mark.parametrize("family", [*TEXT_IS_THE_SAME, "gemma3", "llama4", "got_ocr2"])
def test_text_is_answered_as_by_the_whole_model(family: str, tmp_path: Path) -> None:
    whole = saved(family, tmp_path)
    torch.testing.assert_close(logits_of(tmp_path), expected(whole), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["paligemma", "aya_vision", "cohere2_vision"])
def test_text_that_would_be_answered_otherwise(family: str, tmp_path: Path) -> None:
    """The prompt sees itself in both directions, or logits lack a factor."""
    tiny_config(family).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=f"type '{family}' cannot be served: they are multimodal"):
        load(ModelConfig(model=str(tmp_path), device="cpu"))


@pytest.mark.parametrize("prefix", ["model.", "language_model.model.", "model.language_model."])
def test_names_of_older_and_newer_checkpoints(prefix: str, tmp_path: Path) -> None:
    """Qwen2.5-VL was published with the names of a text model."""
    whole = saved("qwen2_5_vl", tmp_path)
    file = tmp_path / "model.safetensors"
    own = r"^(model\.language_model\.|language_model\.model\.|model\.(?=layers|norm|embed))"
    tensors = {re.sub(own, prefix, name): value for name, value in load_file(file).items()}
    assert f"{prefix}norm.weight" in tensors
    save_file(tensors, file, metadata={"format": "pt"})
    torch.testing.assert_close(logits_of(tmp_path), expected(whole), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("is_stated", [True, False])
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_head_of_its_own_is_used(is_tied: bool, is_stated: bool, tmp_path: Path) -> None:
    """Mistral Small's config does not say that it has one, and the default is that it has none."""
    whole = saved("mistral3", tmp_path, tie_word_embeddings=is_tied)
    if not is_stated:
        file = tmp_path / "config.json"
        config = json.loads(file.read_text())
        del config["tie_word_embeddings"]
        file.write_text(json.dumps(config))
    torch.testing.assert_close(logits_of(tmp_path), expected(whole), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", ["mistral3", "qwen3_vl"])
def test_in_fp8(family: str, tmp_path: Path) -> None:
    """The whole's config says how the part is quantised."""
    whole, form = saved(family, tmp_path), Fp8()

    def of_the_text(name: str, values: torch.Tensor) -> dict[str, torch.Tensor]:
        return form(name, values) if "language_model" in name else {name: values}

    rewrite(tmp_path, form.settings, of_the_text)
    own = {name.split("layers.")[-1]: value for name, value in form.dense.items()}
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            if "language_model" in name and name.split("layers.")[-1] in own:
                parameter.copy_(own[name.split("layers.")[-1]])
    assert len(own) == 4 * 7
    torch.testing.assert_close(logits_of(tmp_path), expected(whole), atol=1e-4, rtol=1e-4)


def test_the_page_lists_them() -> None:
    page = PAGE.read_text()
    listed = page.split("<!-- begin: multimodal -->")[1].split("<!-- end: multimodal -->")[0]
    assert re.findall(r"`(\w+)`", listed) == list(TEXT_IS_THE_SAME)
