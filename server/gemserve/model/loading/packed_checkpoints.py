"""Loads a model whose matrices GPTQ, AWQ or compressed-tensors packed.

Their numbers go into blocks that products read, or are dequantised. All other tensors are loaded as
those of an ordinary checkpoint.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from gemserve.errors import ModelError, shown
from gemserve.model.loading.expert_matrices import expert_matrices, multiply_one_by_one
from gemserve.model.loading.packed_formats import PackedMatrix, Packing, unpack
from gemserve.model.loading.weight_files import COMPUTED, FLOATS, StoredTensor, check_complete
from gemserve_kernels.blocks import TILE, Blocks, put_blocks, stored_bytes

log = logging.getLogger("gemserve.loading")
_INPUTS = 32  # of a block
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
# what transformers does with experts' matrices: one tensor for each, or two that are halves of one
_STACKED = [("MergeModulelist", 0)]
_STACKED_HALVES = [*_STACKED, ("Concatenate", 1)]

Tensors = Mapping[str, StoredTensor]
Names = Mapping[str, str] | None


def load_weights(
    source: str,
    config: Any,
    tensors: Tensors,
    packing: Packing,
    dtype: torch.dtype,
    *,
    in_blocks: bool,
    key_mapping: Names,
    trust_remote_code: bool,
) -> Any:
    """A transformers model on the host. Its parameters have `dtype`.

    `config`: without a `quantization_config`. `in_blocks`: matrices of linear layers stay packed.
    `key_mapping`: patterns of names in the checkpoint, and what stands there in the model.

    Raises `ModelError` if tensors are missing, are too many, or do not fit.
    """
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    names = _modules(tensors, packing)
    _check_others(tensors, names, packing)
    places = _places(names, empty, key_mapping) if in_blocks else {}
    weights, parts = _read(tensors, names, packing, places, dtype)
    num_in_blocks, blocks = len(parts), _joined(parts)
    for full in blocks:
        shape = empty.get_parameter(full).shape
        if len(shape) == 3:
            weights[full] = torch.zeros((), dtype=dtype).expand(shape)
    _leave_out_biases(weights, names, empty)
    model, report = type(empty).from_pretrained(
        None,
        config=config,
        state_dict=weights,
        dtype=dtype,
        key_mapping=key_mapping,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    check_complete(source, model, report)
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    put_blocks(model, blocks, dtype)
    multiply_one_by_one(model)
    _log_sizes(source, model, packing, dtype, num_in_blocks, len(names))
    return model


def plan_blocks(tensors: Tensors, packing: Packing, empty: Any, key_mapping: Names) -> None:
    """Note what matrices of a model on the meta device take if they stay packed."""
    for place in _places(_modules(tensors, packing), empty, key_mapping).values():
        weight: Any = empty.get_parameter(place.weight)
        weight.stored_bytes = stored_bytes(packing.kind, *weight.flatten(0, -2).shape)


def _modules(tensors: Tensors, packing: Packing) -> list[str]:
    """The names of modules whose matrix is packed. Raises `ModelError` if a tensor is missing."""
    marks = {*packing.needed, packing.order}
    split = [name.rpartition(".") for name in tensors]
    names = list(dict.fromkeys(module for module, _, last in split if last in marks))
    for module in names:
        for last in packing.needed:
            if f"{module}.{last}" not in tensors:
                file = next(t.file for n, t in tensors.items() if n.startswith(f"{module}."))
                raise ModelError(
                    f"{file}: has no tensor {module}.{last}, which matrices packed by "
                    f"{packing.method} have"
                )
    return names


def _is_part(name: str, names: set[str], packing: Packing) -> bool:
    module, _, last = name.rpartition(".")
    return module in names and last in {*packing.needed, packing.order}


def _check_others(tensors: Tensors, names: list[str], packing: Packing) -> None:
    """Raise `ModelError` if a tensor that is not packed has other numbers than ordinary ones."""
    known = set(names)
    for name, tensor in tensors.items():
        is_ordinary = tensor.dtype in FLOATS or COMPUTED.search(name)
        if not is_ordinary and not _is_part(name, known, packing):
            raise ModelError(
                f"{tensor.file}: tensor {shown(name)} has the dtype {shown(tensor.dtype)}, and is "
                f"no part of a matrix packed by {packing.method} with these settings; must be one "
                f"of {', '.join(sorted(FLOATS))}"
            )


@dataclass(frozen=True, slots=True)
class _Place:
    """The weight in the model that a packed matrix is, or that it is a part of.

    `expert`, `half`: which one of the matrices of a layer's experts it is, which are one below the
    other. `shape`: what it must have then.
    """

    weight: str
    expert: int = 0
    half: int = 0
    shape: tuple[int, int] | None = None


def _places(names: list[str], empty: Any, key_mapping: Names) -> dict[str, _Place]:
    """Where the packed modules are that can stay so, by their names: linear layers and experts.

    All others are dequantised.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import (
        WeightConverter,
        WeightRenaming,
        rename_source_key,
    )

    changes = get_model_conversion_mapping(empty, dict(key_mapping) if key_mapping else None)
    renamings = [change for change in changes if isinstance(change, WeightRenaming)]
    converters = [change for change in changes if isinstance(change, WeightConverter)]
    wanted = empty.state_dict()
    found: dict[str, _Place] = {}
    of_experts: dict[str, dict[str, str]] = {}
    for module in names:
        full, pattern = rename_source_key(
            f"{module}.weight", renamings, converters, empty.base_model_prefix, wanted
        )
        if pattern is not None:
            of_experts.setdefault(full, {})[module] = pattern
        elif full in wanted and _is_linear(empty, full):
            found[module] = _Place(full)
    for full, _, _ in expert_matrices(empty):
        found.update(_expert_places(full, wanted[full].shape, of_experts.get(full, {}), converters))
    return found


def _expert_places(
    full: str, shape: torch.Size, patterns: Mapping[str, str], converters: list[Any]
) -> dict[str, _Place]:
    """Where the packed matrices of a layer's experts are, if all of them are packed.

    `patterns`: of their names, which transformers knows, by name.
    """
    experts, outs, ins = shape
    for converter in converters:
        done = [(type(step).__name__, vars(step).get("dim")) for step in converter.operations]
        halves = converter.source_patterns
        if not set(patterns.values()) <= set(halves) or done not in (_STACKED, _STACKED_HALVES):
            continue
        rows = outs // len(halves)
        places = {
            module: _Place(full, int(number[1]), halves.index(pattern), (rows, ins))
            for module, pattern in patterns.items()
            if (number := _EXPERT.search(module))
        }
        if len(places) == experts * len(halves) and ins % _INPUTS == 0 and rows % TILE == 0:
            return places
    return {}


def _joined(parts: dict[_Place, Blocks]) -> dict[str, Blocks]:
    """Matrices by their weights' names, those of a layer's experts one below the other.

    It takes the parts away one after the other, so that they are not in memory twice.
    """
    order = sorted(parts, key=lambda place: (place.weight, place.expert, place.half))
    return {
        weight: Blocks.joined([parts.pop(place) for place in places])
        for weight, places in groupby(order, key=lambda place: place.weight)
    }


def _is_linear(empty: Any, full: str) -> bool:
    module = empty.get_submodule(full.rpartition(".")[0])
    return type(module) is torch.nn.Linear and module.in_features % _INPUTS == 0


def _read(
    tensors: Tensors,
    names: list[str],
    packing: Packing,
    places: Mapping[str, _Place],
    dtype: torch.dtype,
) -> tuple[dict[str, torch.Tensor], dict[_Place, Blocks]]:
    """The parameters by their names in the files, and blocks by their places in the model.

    Those in blocks have no memory among the parameters, and experts' are not among them.
    """
    weights: dict[str, torch.Tensor] = {}
    blocks: dict[_Place, Blocks] = {}
    known = set(names)
    with _opened(tensors) as files:
        for name, tensor in tensors.items():
            if not _is_part(name, known, packing):
                plain = files[tensor.file].get_tensor(name)
                kept = dtype if plain.is_floating_point() else plain.dtype
                weights[name] = plain.to(kept, copy=True)
        for module in names:
            with _named(tensors, module, packing):
                matrix = _matrix(files, tensors, module, packing)
                place = places.get(module)
                if place is not None and place.shape is not None:
                    _check_shape(matrix, place.shape)
                    blocks[place] = matrix.blocks()
                elif place is not None and matrix.codes.shape[1] % _INPUTS == 0:
                    made = blocks[place] = matrix.blocks()
                    nothing = torch.zeros((), dtype=dtype).expand(made.outs, made.ins)
                    weights[f"{module}.weight"] = nothing
                else:
                    weights[f"{module}.weight"] = matrix.numbers(dtype)
    return weights, blocks


def _check_shape(matrix: PackedMatrix, shape: tuple[int, int]) -> None:
    if tuple(matrix.codes.shape) != shape:
        raise ValueError(f"has the shape {list(matrix.codes.shape)}, and must have {list(shape)}")


def _leave_out_biases(weights: dict[str, torch.Tensor], names: list[str], empty: Any) -> None:
    """Forget biases of zeros that the model does not have: early files of GPTQ have them."""
    wanted = empty.state_dict()
    for module in names:
        bias = weights.get(f"{module}.bias")
        if bias is not None and f"{module}.bias" not in wanted and not bias.any():
            del weights[f"{module}.bias"]


def _matrix(
    files: Mapping[Path, Any], tensors: Tensors, module: str, packing: Packing
) -> PackedMatrix:
    parts = {}
    for last in (*packing.needed, packing.order):
        stored = tensors.get(f"{module}.{last}")
        if stored is not None:
            parts[last] = files[stored.file].get_tensor(f"{module}.{last}")
    return unpack(packing, parts)


@contextmanager
def _opened(tensors: Tensors) -> Iterator[dict[Path, Any]]:
    from safetensors import safe_open

    with ExitStack() as stack:
        yield {
            path: stack.enter_context(safe_open(path, framework="pt"))
            for path in {tensor.file for tensor in tensors.values()}
        }


@contextmanager
def _named(tensors: Tensors, module: str, packing: Packing) -> Iterator[None]:
    """Errors of a matrix have its file's and its module's name."""
    try:
        yield
    except ValueError as error:
        file = tensors[f"{module}.{packing.needed[0]}"].file
        raise ModelError(f"{file}: {module}: {error}") from error


def _log_sizes(
    source: str, model: Any, packing: Packing, dtype: torch.dtype, num_blocks: int, num_packed: int
) -> None:
    log.info(
        "%s: %d matrices packed by %s, %d of them in blocks (%s), the others and all else in %s: "
        "%s bytes in memory",
        source,
        num_packed,
        packing.method,
        num_blocks,
        packing.kind.name,
        str(dtype).removeprefix("torch."),
        f"{sum(getattr(p, 'stored_bytes', p.nbytes) for p in model.parameters()):,}",
    )
