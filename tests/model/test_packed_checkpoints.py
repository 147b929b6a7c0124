"""Checkpoints of GPTQ, AWQ and compressed-tensors stay packed on a CPU, or are dequantised."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING

from gemserve.config import ModelConfig
from gemserve.errors import ConfigError, ModelError
from gemserve.model.base_model import base_of, hash_norms
from gemserve.model.cpu.cpu_step import with_cpu_step
from gemserve.model.cpu.packed_linear import with_packed_linears
from gemserve.model.fused_parts import with_fused_parts
from gemserve.model.loading.loader import check_ranks, load, model_from_config
from gemserve.model.loading.quantised import check_quantisation
from gemserve.model.loading.weight_memory import weights_of
from gemserve.model.passes.causal_model import CausalModel
from gemserve_kernels import native_library
from gemserve_kernels.blocks import BlockWeight, has_blocks
from tests.compiled_step import NO_COMPILER, compiled_step, needs_compiler
from tests.model import packed_files
from tests.model.packed_files import Form, Matrix, Tensors
from tests.model.test_quantised import expected, logits_of
from tests.step_prompts import Prompts, needs_bfloat16

pytestmark = needs_compiler
SIZES: dict[str, Any] = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "head_dim": 32,
    "num_hidden_layers": 2,
}
FORMS = {
    "gptq 32": Form(method="gptq", group=32),
    "gptq 64 symmetric": Form(method="gptq", group=64, is_symmetric=True),
    "gptq 128 v2": Form(method="gptq", group=128, version=2),
    "gptq row": Form(method="gptq", group=-1, is_symmetric=True),
    "gptq 128 of 8 bits": Form(method="gptq", group=128, is_symmetric=True, bits=8),
    "awq 32": Form(method="awq", group=32),
    "awq 64": Form(method="awq", group=64),
    "awq 128": Form(method="awq", group=128),
    "compressed 32": Form(method="compressed-tensors", group=32),
    "compressed 64 symmetric": Form(method="compressed-tensors", group=64, is_symmetric=True),
    "compressed 128": Form(method="compressed-tensors", group=128),
    "compressed 128 symmetric": Form(method="compressed-tensors", group=128, is_symmetric=True),
    "compressed row": Form(method="compressed-tensors", group=-1),
    "compressed 128 of 8 bits": Form(
        method="compressed-tensors", group=128, is_symmetric=True, bits=8
    ),
}
ONE_OF_EACH = ("gptq 32", "awq 64", "compressed 128 symmetric")
HALF = pytest.param("bfloat16", marks=needs_bfloat16)


@pytest.fixture(autouse=True)
def _compiler() -> Iterator[None]:
    with compiled_step():
        yield


def config(folder: Path, **options: Any) -> ModelConfig:
    return ModelConfig(model=str(folder), **{"device": "cpu", "dtype": "float32", **options})


def loaded(folder: Path, **options: Any) -> CausalModel:
    return load(config(folder, **options)).model


def check_numbers(model: CausalModel, made: dict[str, Matrix], form: Form) -> None:
    """Numbers of blocks are those of the format, apart from minima that float16 rounds."""
    found = dict(model.hf.named_parameters())
    for name, matrix in made.items():
        weight = found[name]
        assert isinstance(weight, BlockWeight), name
        exact, numbers = matrix.numbers(), weight.blocks.numbers(torch.float32)
        if form.is_symmetric:
            assert torch.equal(numbers, exact), name
            continue
        minima = torch.from_numpy(matrix.spread(matrix.scales * matrix.zeros))
        # half a unit of the last place, and what float32 rounds
        assert ((numbers - exact).abs() <= minima * (2**-11 + 2**-20) + 2**-25).all(), name


@pytest.mark.parametrize("name", FORMS)
def test_numbers_and_logits_are_those_of_the_format(name: str, tmp_path: Path) -> None:
    form = FORMS[name]
    made = packed_files.save(tmp_path, form, **SIZES)
    assert len(made) == 14
    kept = loaded(tmp_path)
    assert has_blocks(kept.hf)
    check_numbers(kept, made, form)
    assert not isinstance(kept.hf.lm_head.weight, BlockWeight)
    dense = loaded(tmp_path, weights="dense")
    assert not has_blocks(dense.hf)
    weights = dict(dense.hf.named_parameters())
    for weight, matrix in made.items():
        assert torch.equal(weights[weight], matrix.numbers()), weight
    assert hash_norms(kept.hf) == hash_norms(dense.hf)
    numbers = {weight: matrix.numbers() for weight, matrix in made.items()}
    exact = expected("llama", numbers, **SIZES)
    torch.testing.assert_close(logits_of(dense), exact, atol=1e-4, rtol=1e-4)
    largest = float(exact.abs().max())
    torch.testing.assert_close(logits_of(kept), exact, atol=0.05 * largest, rtol=0)


@pytest.mark.parametrize("dtype", ["float32", HALF])
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_steps_and_layers_agree(name: str, dtype: str, tmp_path: Path) -> None:
    """Some projections of a layer are not packed, as `modules_to_not_convert` leaves them."""

    def is_packed(weight: str) -> bool:
        return packed_files.is_projection(weight) and ".1.self_attn.k" not in weight

    packed_files.save(tmp_path, FORMS[name], family="qwen3", is_packed=is_packed, **SIZES)
    model = loaded(tmp_path, dtype=dtype)
    assert {weight.dtype for weight in model.hf.parameters()} == {getattr(torch, dtype)}
    assert not isinstance(model.hf.model.layers[1].self_attn.k_proj.weight, BlockWeight)
    faster = model.variant(with_fused_parts(with_packed_linears(model.hf)))
    prompts = Prompts(faster, [1, 40])
    stepped = prompts.decode(with_cpu_step(faster, "auto"))
    largest = float(stepped.abs().max())
    torch.testing.assert_close(stepped, prompts.decode(model), atol=0.05 * largest, rtol=0)


@pytest.mark.parametrize("name", ["gptq 32", "awq 32", "compressed 32"])
def test_odd_sizes_are_dequantised(name: str, tmp_path: Path) -> None:
    """104 inputs are no whole blocks, and the last group has 8; 104 outputs are no whole tiles."""
    form = FORMS[name]
    sizes = {**SIZES, "intermediate_size": 104}
    made = packed_files.save(tmp_path, form, **sizes)
    model = loaded(tmp_path)
    weights = dict(model.hf.named_parameters())
    for weight in [name for name in made if "down_proj" in name]:
        assert torch.equal(weights[weight], made.pop(weight).numbers()), weight
    check_numbers(model, made, form)


def test_a_last_group_that_is_smaller(tmp_path: Path) -> None:
    form = FORMS["gptq 128 v2"]
    made = packed_files.save(tmp_path, form, **{**SIZES, "intermediate_size": 192})
    check_numbers(loaded(tmp_path), made, form)


def test_experts_and_heads(tmp_path: Path) -> None:
    """transformers has the matrices of all experts in one tensor."""

    def is_packed(weight: str) -> bool:
        return packed_files.is_projection(weight) or weight == "lm_head.weight"

    form = FORMS["gptq 32"]
    made = packed_files.save(tmp_path, form, family="qwen3_moe", is_packed=is_packed)
    model = loaded(tmp_path)
    numbers = {name: matrix.numbers() for name, matrix in made.items()}
    assert torch.allclose(
        logits_of(loaded(tmp_path, weights="dense")),
        expected("qwen3_moe", numbers),
        rtol=1e-4,
        atol=1e-4,
    )
    check_numbers(model, {n: m for n, m in made.items() if ".experts." not in n}, form)
    layer = "model.layers.0.mlp.experts"
    experts = model.hf.model.layers[0].mlp.experts
    assert isinstance(experts.down_proj, BlockWeight)
    assert isinstance(experts.gate_up_proj, BlockWeight)
    halves = [numbers[f"{layer}.3.{half}_proj.weight"] for half in ("gate", "up")]
    for weight, exact in (
        (experts.down_proj[2], numbers[f"{layer}.2.down_proj.weight"]),
        (experts.gate_up_proj[3], torch.cat(halves)),
    ):
        torch.testing.assert_close(weight + 0, exact, atol=2e-3, rtol=2e-3)
    prompts = Prompts(model, [1, 40])
    stepped = prompts.decode(with_cpu_step(model, "on"))
    largest = float(stepped.abs().max())
    torch.testing.assert_close(stepped, prompts.decode(model), atol=0.05 * largest, rtol=0)


def test_experts_that_are_not_all_packed_are_dequantised(tmp_path: Path) -> None:
    def is_packed(weight: str) -> bool:
        return packed_files.is_projection(weight) and ".experts.1.up_proj" not in weight

    form = FORMS["awq 32"]
    made = packed_files.save(tmp_path, form, family="qwen3_moe", is_packed=is_packed)
    experts = loaded(tmp_path).hf.model.layers[1].mlp.experts
    assert isinstance(experts.down_proj, BlockWeight)
    assert not isinstance(experts.gate_up_proj, BlockWeight)
    gate = made["model.layers.1.mlp.experts.1.gate_proj.weight"].numbers()
    assert torch.equal(experts.gate_up_proj[1][: len(gate)], gate)


def test_a_packed_head_beside_an_embedding(tmp_path: Path) -> None:
    """A config that ties them does not make the head's numbers the embedding's."""
    form = FORMS["gptq 32"]
    made = packed_files.save(tmp_path, form, is_packed=lambda name: name == "lm_head.weight")
    rows = packed_files.read(tmp_path)["model.embed_tokens.weight"]
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "tie_word_embeddings": True}))
    model = loaded(tmp_path)
    assert torch.equal(model.hf.model.embed_tokens.weight, rows)
    check_numbers(model, made, form)


def test_the_text_model_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    """Names in such files are those of the whole, and those in the model of its part."""
    form = FORMS["awq 32"]
    made = packed_files.save(tmp_path, form, **SIZES)
    renamed = {
        name.replace("model.", "model.language_model.", 1): tensor
        for name, tensor in packed_files.read(tmp_path).items()
    }
    packed_files.write(tmp_path, renamed)
    as_llava(tmp_path)
    check_numbers(loaded(tmp_path), made, form)


def as_llava(folder: Path) -> None:
    """Change the config to one of LLaVA around the model."""
    file = folder / "config.json"
    text = json.loads(file.read_text())
    settings = text.pop("quantization_config")
    whole = CONFIG_MAPPING["llava"](text_config=text, tie_word_embeddings=False)
    file.write_text(json.dumps({**whole.to_dict(), "quantization_config": settings}))
    assert json.loads(file.read_text())["model_type"] == "llava"


@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_memory_is_planned_as_it_is(name: str, tmp_path: Path) -> None:
    packed_files.save(tmp_path, FORMS[name], **SIZES)
    settings: Any = {"filter_layer": 1, "filter_precision": "model", "offload_layers": 0}
    taken = {}
    for weights in ("auto", "dense"):
        asked = config(tmp_path, weights=weights)
        empty, dtype, _ = model_from_config(asked)
        taken[weights] = weights_of(empty, dtype, **settings)
        assert taken[weights] == weights_of(load(asked).model.hf, dtype, **settings)
    assert taken["auto"].device < 0.3 * taken["dense"].device


def test_end_tokens_and_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("gemserve.loading"), "propagate", True)
    caplog.set_level(logging.INFO, logger="gemserve.loading")
    packed_files.save(tmp_path, FORMS["awq 64"], **SIZES)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 7]}')
    model = load(config(tmp_path))
    assert model.eos_ids == {2, 7}
    assert base_of(model.model)
    assert "14 matrices packed by awq, 14 of them in blocks (Q4_1)" in caplog.text
    assert "not sharded" not in caplog.text


def test_without_a_compiler_numbers_are_dequantised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    packed_files.save(tmp_path, FORMS["gptq 32"])
    monkeypatch.setenv("CXX", NO_COMPILER)
    native_library.forget_libraries()
    assert not has_blocks(loaded(tmp_path).hf)


def test_the_rest_can_be_quantised(tmp_path: Path) -> None:
    made = packed_files.save(tmp_path, FORMS["awq 32"])
    model = loaded(tmp_path, quantise="int8")
    assert isinstance(model.hf.lm_head.weight, BlockWeight)
    check_numbers(model, made, FORMS["awq 32"])


def test_several_files(tmp_path: Path) -> None:
    """A matrix's tensors may lie in different files."""
    made = packed_files.save(tmp_path, FORMS["awq 32"])
    tensors = packed_files.read(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    index = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in set(index.values()):
        some = {name: tensors[name] for name in index if index[name] == file}
        packed_files.save_file(some, tmp_path / file, metadata={"format": "pt"})
    file = tmp_path / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": index}))
    check_numbers(loaded(tmp_path), made, FORMS["awq 32"])
    file.unlink()
    with pytest.raises(ModelError, match=r"has no model\.safetensors, nor an index"):
        loaded(tmp_path)


def test_a_model_of_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its files lie in the cache; what is planned before they do is planned dequantised."""
    place = tmp_path / "models--some--model"
    folder = place / "snapshots" / "0123"
    folder.mkdir(parents=True)
    made = packed_files.save(folder, FORMS["awq 32"])
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path))
    named = config(Path("some/model"))
    check_numbers(load(named).model, made, FORMS["awq 32"])
    empty, _, _ = model_from_config(named)
    assert any(hasattr(weight, "stored_bytes") for weight in empty.parameters())
    (folder / "model.safetensors").unlink()
    empty, _, _ = model_from_config(named)
    assert not any(hasattr(weight, "stored_bytes") for weight in empty.parameters())
    with pytest.raises(ModelError, match="couldn't find them in the cached files"):
        load(named)


GPTQ, AWQ = FORMS["gptq 32"].settings, FORMS["awq 32"].settings
COMPRESSED = FORMS["compressed 32"].settings


def weights_with(**changes: Any) -> dict[str, Any]:
    group = COMPRESSED["config_groups"]["group_0"]
    return {"config_groups": {"group_0": {**group, "weights": {**group["weights"], **changes}}}}


def group_with(**changes: Any) -> dict[str, Any]:
    return {"config_groups": {"group_0": {**COMPRESSED["config_groups"]["group_0"], **changes}}}


WRONG_SETTINGS = {
    "GPTQ of 3 bits": (GPTQ, {"bits": 3}, "bits=3: must be 4 or 8"),
    "bits that are words": (GPTQ, {"bits": "4"}, "bits='4': must be 4 or 8"),
    "GPTQ of 8 bits": (GPTQ, {"bits": 8}, "8 bits with zero points: must be symmetric"),
    "no whole blocks": (GPTQ, {"group_size": 48}, "group_size=48: must be a multiple of 32, or -1"),
    "a group of yes": (AWQ, {"group_size": True}, "group_size=True: must be a multiple of 32"),
    "Marlin": (
        GPTQ,
        {"checkpoint_format": "marlin"},
        "checkpoint_format='marlin': must be gptq or",
    ),
    "older Marlin": (GPTQ, {"is_marlin_format": True}, "is_marlin_format=True: must be False"),
    "symmetry": (GPTQ, {"sym": 1}, "sym=1: must be True or False"),
    "AWQ of 8 bits": (AWQ, {"bits": 8}, "bits=8: must be 4;"),
    "another version": (AWQ, {"version": "GEMV"}, "version='gemv': must be gemm"),
    "no zero points": (AWQ, {"zero_point": False}, "zero_point=False: must be True"),
    "FP8": (COMPRESSED, {"format": "float-quantized"}, "format='float-quantized': must be pack-"),
    "no groups": (COMPRESSED, {"config_groups": {}}, "config_groups has 0 ways of packing"),
    "no object": (COMPRESSED, {"config_groups": 4}, "config_groups=4: must be an object"),
    "no weights": (COMPRESSED, group_with(weights=None), r"group_0=.*: must have weights"),
    "activations": (
        COMPRESSED,
        group_with(input_activations={"num_bits": 8}),
        r"config_groups\.group_0\.input_activations=.* must be null",
    ),
    "2 bits": (COMPRESSED, weights_with(num_bits=2), r"weights\.num_bits=2: must be 4 or 8"),
    "floats": (COMPRESSED, weights_with(type="float"), r"weights\.type='float': must be int"),
    "one scale": (COMPRESSED, weights_with(strategy="tensor"), r"strategy='tensor': must be group"),
    "few inputs": (COMPRESSED, weights_with(group_size=16), r"group_size=16: must be a multiple"),
    "several ways": (
        COMPRESSED,
        {
            "config_groups": {
                **COMPRESSED["config_groups"],
                "group_1": FORMS["compressed 64 symmetric"].settings["config_groups"]["group_0"],
            }
        },
        "config_groups has 2 ways of packing; must be one",
    ),
    "a cache": (
        COMPRESSED,
        {"kv_cache_scheme": {"num_bits": 8}},
        "kv_cache_scheme=.* must be null",
    ),
    "rotations": (
        COMPRESSED,
        {"transform_config": {"config_groups": {"u": {}}}},
        "transform_config=.*: must be null",
    ),
}


@pytest.fixture(scope="module")
def packed_folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {}
    for name in ("gptq 32", "compressed 32"):
        made[name] = tmp_path_factory.mktemp("packed")
        packed_files.save(made[name], FORMS[name])
    return made


@pytest.fixture
def folder(packed_folders: dict[str, Path], tmp_path: Path) -> Path:
    """A copy of a checkpoint of GPTQ."""
    return shutil.copytree(packed_folders["gptq 32"], tmp_path / "copy")


@pytest.mark.parametrize("name", WRONG_SETTINGS)
def test_settings_that_are_not_read(folder: Path, name: str) -> None:
    """Before weights are read, which need not be there."""
    settings, changes, message = WRONG_SETTINGS[name]
    packed_files.state(folder, {**settings, **changes})
    (folder / "model.safetensors").unlink()
    for refuse in (load, model_from_config):
        with pytest.raises(ModelError, match=f"quantization_config.*{message}") as caught:
            refuse(config(folder))
        assert "serve the original model, or its form in GGUF" in str(caught.value)


QUERY = "model.layers.1.self_attn.q_proj"


def changed(
    last: str, change: Callable[[torch.Tensor], torch.Tensor]
) -> Callable[[Tensors], object]:
    name = f"{QUERY}.{last}"
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


WRONG_TENSORS: dict[str, tuple[str, Callable[[Tensors], object], str]] = {
    "no scales": ("gptq 32", lambda t: t.pop(f"{QUERY}.scales"), f"has no tensor {QUERY}.scales"),
    "no codes": ("gptq 32", lambda t: t.pop(f"{QUERY}.qweight"), f"no tensor {QUERY}.qweight, wh"),
    "too few scales": (
        "gptq 32",
        changed("scales", lambda s: s[:1]),
        r"q_proj: scales is float16 \[1, 64\]: must be a floating-point dtype \[2, 64\] for a ma",
    ),
    "zero points of another dtype": (
        "gptq 32",
        changed("qzeros", lambda z: z.long()),
        r"qzeros is int64 \[2, 8\]: must be int32 \[2, 8\]",
    ),
    "codes of another dtype": (
        "gptq 32",
        changed("qweight", lambda w: w.short()),
        r"qweight is int16 \[8, 64\]: must be int32 of two axes",
    ),
    "another order": (
        "gptq 32",
        changed("g_idx", lambda g: g.flip(0)),
        "g_idx says that groups of 32 inputs are not beside each other, as desc_act makes them",
    ),
    "fewer inputs than the model has": (
        "gptq 32",
        lambda t: [
            changed(last, lambda some: some[: len(some) // 2])(t)
            for last in ("qweight", "scales", "qzeros", "g_idx")
        ],
        rf"tensor {QUERY}.weight has shape \[64, 32\], and by config.json \[64, 64\]",
    ),
    "inputs that are no whole blocks": (
        "gptq 32",
        lambda t: [
            changed(last, lambda some: some[: len(some) * 3 // 4])(t)
            for last in ("qweight", "g_idx")
        ],
        rf"tensor {QUERY}.weight has shape \[64, 48\], and by config.json \[64, 64\]",
    ),
    "scales that float16 cannot hold": (
        "compressed 32",
        changed("weight_scale", lambda s: s * 1e7),
        r"scales of .* zero points of up to .*, which float16 cannot hold .* or weights=dense",
    ),
    "scales that are no numbers": (
        "compressed 32",
        changed("weight_scale", lambda s: s * torch.nan),
        "q_proj.weight has numbers that are not finite",
    ),
    "a shape of nothing": (
        "compressed 32",
        changed("weight_shape", lambda s: s * 0),
        "q_proj: a matrix of 0 outputs and 0 inputs: both must be at least 1",
    ),
    "no inputs": (
        "gptq 32",
        changed("qweight", lambda w: w[:0]),
        "q_proj: a matrix of 64 outputs and 0 inputs: both must be at least 1",
    ),
    "a shape of one number": (
        "compressed 32",
        changed("weight_shape", lambda s: s[:1]),
        r"weight_shape is int64 \[1\]: must be two whole numbers",
    ),
    "a shape that does not fit": (
        "compressed 32",
        changed("weight_shape", lambda s: s + 64),
        r"weight_packed is int32 \[64, 8\]: must be int32 \[128, 16\]",
    ),
    "codes without packing": (
        "compressed 32",
        lambda t: t.update({f"{QUERY}.weight": torch.ones(64, 64).char()}),
        rf"tensor '{QUERY}.weight' has the dtype 'I8', and is no part of a matrix packed by",
    ),
    "another order of compressed-tensors": (
        "compressed 32",
        lambda t: t.update({f"{QUERY}.weight_g_idx": torch.arange(64).int() % 2}),
        "weight_g_idx says that .* as actorder makes them",
    ),
}


@pytest.mark.parametrize("name", WRONG_TENSORS)
def test_tensors_that_do_not_fit(
    packed_folders: dict[str, Path], tmp_path: Path, name: str
) -> None:
    form, change, message = WRONG_TENSORS[name]
    folder = shutil.copytree(packed_folders[form], tmp_path / "copy")
    tensors = packed_files.read(folder)
    change(tensors)
    packed_files.write(folder, tensors)
    with pytest.raises(ModelError, match=message) as caught:
        loaded(folder)
    assert "\n" not in str(caught.value)


def test_other_zero_points_than_a_symmetric_checkpoint_s(folder: Path) -> None:
    packed_files.state(folder, {**GPTQ, "sym": True})
    with pytest.raises(ModelError, match="qzeros has zero points other than 8, and sym is true"):
        loaded(folder)


def test_orders_that_are_none(folder: Path) -> None:
    """Some programs write zeros where groups are beside each other."""
    before = loaded(folder)
    tensors = packed_files.read(folder)
    tensors |= {name: some * 0 for name, some in tensors.items() if name.endswith(".g_idx")}
    packed_files.write(folder, tensors)
    assert torch.equal(logits_of(before), logits_of(loaded(folder)))


def test_biases_that_the_model_does_not_have(folder: Path) -> None:
    """Early versions of AutoGPTQ wrote zeros; other numbers would change the logits."""
    before = loaded(folder)
    tensors = packed_files.read(folder)
    packed_files.write(folder, {**tensors, f"{QUERY}.bias": torch.zeros(64).half()})
    assert torch.equal(logits_of(before), logits_of(loaded(folder)))
    packed_files.write(folder, {**tensors, f"{QUERY}.bias": torch.ones(64).half()})
    with pytest.raises(ModelError, match=rf"no place for: {QUERY}\.bias"):
        loaded(folder)


def test_large_scales_can_be_dequantised(packed_folders: dict[str, Path], tmp_path: Path) -> None:
    folder = shutil.copytree(packed_folders["compressed 32"], tmp_path / "copy")
    tensors = packed_files.read(folder)
    changed("weight_scale", lambda scales: scales * 1e7)(tensors)
    packed_files.write(folder, tensors)
    model = loaded(folder, weights="dense")
    assert float(model.hf.model.layers[1].self_attn.q_proj.weight.abs().max()) > 1e5


def test_on_a_gpu_they_are_refused(folder: Path) -> None:
    with pytest.raises(ModelError, match=r"GPTQ, .* does not serve on cuda, only on a CPU"):
        model_from_config(config(folder, device="cuda"))
    checked = model_from_config(config(folder))[0].config
    with pytest.raises(ModelError, match="serve the original model, or its form in GGUF"):
        check_quantisation("model", checked, torch.device("cuda"))


def test_ranks_are_refused(folder: Path) -> None:
    with pytest.raises(ConfigError, match="tensor_parallel=2: not for quantised weights"):
        check_ranks(config(folder), 2)
