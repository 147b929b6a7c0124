"""Where a model ends: positions, contexts, token ids, and the text part of a multimodal one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    CONFIG_MAPPING,
    AutoModelForCausalLM,
    AutoTokenizer,
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma3TextConfig,
    LlamaConfig,
    MambaConfig,
)

from gemserve.config import EngineConfig, ModelConfig
from gemserve.engine.build import assemble
from gemserve.errors import ConfigError, ModelError, RequestError
from gemserve.llm import LLM
from gemserve.model.families.config_check import check_config, find_context_tokens
from gemserve.model.loading.checkpoint import BUILTIN_PATH
from gemserve.model.loading.loader import LoadedModel, load, model_from_config
from gemserve.model.passes.causal_model import CausalModel
from tests import models

SMALL = EngineConfig(kv_memory_bytes=8 << 20, calibrate="off")


def yarn(**rope: Any) -> LlamaConfig:
    parameters = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, **rope}
    return LlamaConfig(
        **{**models.SIZES, "max_position_embeddings": 512}, rope_parameters=parameters
    )


@pytest.mark.parametrize(
    ("rope", "context"),
    [
        ({"original_max_position_embeddings": 512}, 2048),
        ({}, 2048),
        ({"original_max_position_embeddings": 256}, 1024),
        ({"original_max_position_embeddings": 64}, 512),
    ],
    ids=["as model cards write it", "without an original", "a part", "raised already"],
)
def test_yarn_lengthens_the_context(rope: dict[str, Any], context: int) -> None:
    """Cards say to add a factor, and leave `max_position_embeddings` as it is."""
    assert find_context_tokens(yarn(**rope)) == context


def loaded_of(model: CausalModel) -> LoadedModel:
    return LoadedModel(
        model=model, tokenizer=None, eos_ids=frozenset(), source="/nowhere", name="/nowhere"
    )


def test_learned_positions_end_where_they_end() -> None:
    """A filter pass over a longer prompt raised an IndexError; a GPU would have given up."""
    loaded = loaded_of(CausalModel(models.build("opt")))
    assert loaded.model.learned_positions == 2048
    with pytest.raises(ConfigError, match=r"max_prompt_tokens=4000: must be from 1 to 2048"):
        assemble(loaded, EngineConfig(kv_memory_bytes=1 << 20, max_prompt_tokens=4000))
    assemble(loaded, EngineConfig(kv_memory_bytes=1 << 20))
    assert CausalModel(models.build("llama")).learned_positions is None


def test_a_token_that_the_model_has_not_is_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Some checkpoints add a token for padding, and no row to the embedding."""
    models.save("llama", tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    missing = models.VOCAB - len(tokenizer)
    tokenizer.add_tokens([f"<extra_{i}>" for i in range(max(0, missing) + 1)])
    tokenizer.save_pretrained(tmp_path)
    llm = LLM(ModelConfig(model=str(tmp_path), device="cpu"), SMALL)
    assert "tokens that the model of" in caplog.text
    last = tokenizer.convert_ids_to_tokens(models.VOCAB)
    with pytest.raises(RequestError, match=f"token id {models.VOCAB} is not one of the model's"):
        llm.generate(f"river {last} river", max_tokens=1)
    assert llm.generate("river river", max_tokens=1).token_ids


def test_the_text_part_of_a_multimodal_checkpoint_is_served(tmp_path: Path) -> None:
    text = Gemma3TextConfig(
        **{**models.SIZES, "tie_word_embeddings": True},
        head_dim=16,
        sliding_window=64,
        layer_types=["sliding_attention", "full_attention"] * 2,
    )
    vision = {
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    config = Gemma3Config(text_config=text.to_dict(), vision_config=vision, mm_tokens_per_image=4)
    torch.manual_seed(0)
    whole = Gemma3ForConditionalGeneration(config).eval()
    whole.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(BUILTIN_PATH).save_pretrained(tmp_path)
    loaded = load(ModelConfig(model=str(tmp_path), device="cpu", dtype="float32"))
    ids = list(range(10, 110))
    kv = loaded.model.new_memory(8 * 100).kv(0, num_layers=4, capacity=100)
    logits = loaded.model.prefill_chunk(ids, start=0, kv=kv, rope_tokens=100, is_last=True)
    with torch.inference_mode():
        expected = whole(input_ids=torch.tensor([ids])).logits[0, -1:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_a_recurrent_model_is_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    """Its config has no heads: there was a traceback."""
    MambaConfig(hidden_size=32, num_hidden_layers=2).save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"type 'mamba' cannot be served: they have no attention"):
        load(ModelConfig(model=str(tmp_path), device="cpu"))


@pytest.mark.parametrize("family", ["mllama_text_model", "qwen3_vl_text", "clip_text_model"])
def test_a_type_without_a_causal_model_is_refused_by_name(family: str, tmp_path: Path) -> None:
    """transformers' message was a list of all that it has."""
    CONFIG_MAPPING[family]().save_pretrained(tmp_path)
    message = f"type '{family}' cannot be served: transformers has no causal language model"
    for read in (load, model_from_config):
        with pytest.raises(ModelError, match=message):
            read(ModelConfig(model=str(tmp_path), device="cpu"))


@pytest.mark.parametrize("name", ["foo", "foo/bar"])
def test_a_name_of_nothing(name: str) -> None:
    """The message was only about the hub."""
    with pytest.raises(
        ModelError, match=f"cannot load model '{name}': no such directory or GGUF file"
    ):
        load(ModelConfig(model=name, device="cpu"))


@pytest.mark.parametrize("kind", ["linear_attention", "conv"])
def test_layers_with_a_state_that_the_model_has_not_are_refused(kind: str) -> None:
    """Llama's layers attend whatever their config calls them."""
    config = models.config("llama")
    config.layer_types = ["full_attention", kind] * 2
    check_config(config)
    with pytest.raises(ModelError, match="which they do not keep in transformers' cache"):
        CausalModel(AutoModelForCausalLM.from_config(config))


@pytest.mark.parametrize("kind", ["indexed_attention", "mystery"])
def test_an_unknown_kind_of_layer_is_refused_by_name(kind: str) -> None:
    config = models.config("llama")
    config.layer_types = ["full_attention", kind] * 2
    with pytest.raises(ModelError, match=f"layers of type '{kind}'"):
        check_config(config)


def test_a_model_in_bfloat16_is_compared_in_float32() -> None:
    """One layer at a time is converted, and the model stays as it is."""
    model = CausalModel(
        AutoModelForCausalLM.from_config(models.config("qwen3"), dtype=torch.bfloat16)
    )
    exact = model.in_float32()
    ids = list(range(5, 40))
    kv = exact.new_memory(8 * 40).kv(0, num_layers=4, capacity=40)
    logits = exact.prefill_chunk(ids, start=0, kv=kv, rope_tokens=40, is_last=True)
    assert logits is not None
    assert exact.dtype == torch.float32
    assert {p.dtype for p in model.hf.parameters()} == {torch.bfloat16}
    wide = AutoModelForCausalLM.from_config(models.config("qwen3"), dtype=torch.float32).eval()
    wide.load_state_dict(model.hf.state_dict())
    wide.model.layers = wide.model.layers[:2]  # all are of one kind
    with torch.inference_mode():
        expected = wide(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1:]
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_memory_that_cannot_be_had_is_named() -> None:
    """The start ended with a traceback of the allocator."""
    huge = EngineConfig(kv_memory_bytes=1 << 55, calibrate="off", cpu_step="off")
    loaded = load(ModelConfig(device="cpu"))
    with pytest.raises(ConfigError, match=r"kv_memory: \d+ bytes cannot be allocated here; lower"):
        assemble(loaded, huge)
