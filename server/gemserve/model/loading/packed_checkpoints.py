"""Loads a model whose matrices GPTQ, AWQ or compressed-tensors packed.

Their numbers go into blocks that products read, or are dequantised. All other tensors are loaded as
those of an ordinary checkpoint.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from gemserve.errors import ModelError, shown
from gemserve.model.loading.packed_formats import PackedMatrix, Packing, unpack
from gemserve.model.loading.weight_files import COMPUTED, FLOATS, StoredTensor, check_complete
from gemserve_kernels.blocks import Blocks, put_blocks, stored_bytes

log = logging.getLogger("gemserve.loading")
_INPUTS = 32  # of a block

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
    weights, blocks = _read(tensors, names, packing, places, dtype)
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
    _log_sizes(source, model, packing, dtype, len(blocks), len(names))
    return model


def plan_blocks(tensors: Tensors, packing: Packing, empty: Any, key_mapping: Names) -> None:
    """Note what matrices of a model on the meta device take if they stay packed."""
    for full in _places(_modules(tensors, packing), empty, key_mapping).values():
        weight: Any = empty.get_parameter(full)
        weight.stored_bytes = stored_bytes(packing.kind, *weight.shape)


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


def _places(names: list[str], empty: Any, key_mapping: Names) -> dict[str, str]:
    """The weight of each packed module that can stay so: a linear layer's, by the module's name.

    Others, such as matrices of experts that transformers has in one tensor, are dequantised.
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
    found = {}
    for module in names:
        full, converted = rename_source_key(
            f"{module}.weight", renamings, converters, empty.base_model_prefix, wanted
        )
        if converted is None and full in wanted and _is_linear(empty, full):
            found[module] = full
    return found


def _is_linear(empty: Any, full: str) -> bool:
    module = empty.get_submodule(full.rpartition(".")[0])
    return type(module) is torch.nn.Linear and module.in_features % _INPUTS == 0


def _read(
    tensors: Tensors,
    names: list[str],
    packing: Packing,
    places: Mapping[str, str],
    dtype: torch.dtype,
) -> tuple[dict[str, torch.Tensor], dict[str, Blocks]]:
    """The parameters by their names in the files, and blocks by their names in the model.

    Those in blocks have no memory among the parameters.
    """
    weights: dict[str, torch.Tensor] = {}
    blocks: dict[str, Blocks] = {}
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
                if module in places and matrix.codes.shape[1] % _INPUTS == 0:
                    made = blocks[places[module]] = matrix.blocks()
                    nothing = torch.zeros((), dtype=dtype).expand(made.outs, made.ins)
                    weights[f"{module}.weight"] = nothing
                else:
                    weights[f"{module}.weight"] = matrix.numbers(dtype)
    return weights, blocks


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
