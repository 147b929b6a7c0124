"""Checks that a checkpoint's files are whole, and that they have every weight of the model.

transformers fills in random numbers where a checkpoint has none, and only warns.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemserve.errors import ModelError, shown

log = logging.getLogger("gemserve.loading")

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"
_MOST_HEADER = 100 << 20  # bytes; the limit of the safetensors library
FLOATS = {"F64", "F32", "F16", "BF16"}
_LAYER = re.compile(r"(?:^|\.)(?:layers|h|blocks|block)\.(\d+)\.")
# buffers that older releases of transformers stored, and that are computed today
COMPUTED = re.compile(r"(?:inv_freq|masked_bias|(?:attention|attn)\.bias)$")


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor as a safetensors file's header describes it. `dtype` is the format's name."""

    dtype: str
    shape: tuple[int, ...]
    file: Path


def check_files(folder: Path, *, is_quantised: bool) -> dict[str, StoredTensor]:
    """The tensors of a folder's safetensors files by name. Only headers are read.

    Raises `ModelError` with the file's name if one is missing or cut off, if the index names
    tensors that are not there, or if weights are not floating-point numbers and the model is not
    `is_quantised`. A folder without such files is left to transformers.
    """
    index, found = folder / _INDEX, dict[str, dict[str, StoredTensor]]()
    if (folder / _SINGLE).is_file():
        names, indexed = [_SINGLE], {}
    elif index.is_file():
        indexed = _read_index(index)
        names = sorted(set(indexed.values()))
    else:
        return {}
    for name in names:
        path = folder / name
        if not path.is_file():
            raise ModelError(f"{path}: no such file, and {index.name} names it")
        tensors = _read_header(path)
        found[name] = tensors
        odd = {t: stored.dtype for t, stored in tensors.items() if stored.dtype not in FLOATS}
        if odd and not is_quantised:
            tensor, dtype = next(iter(odd.items()))
            raise ModelError(
                f"{path}: tensor {shown(tensor)} has the dtype {shown(dtype)}, and config.json has "
                f"no quantization_config; must be one of {', '.join(sorted(FLOATS))}"
            )
    lost = sorted(tensor for tensor, name in indexed.items() if tensor not in found[name])
    if lost:
        raise ModelError(
            f"{folder / indexed[lost[0]]}: has no tensor {_listed(lost)}, and {index.name} says "
            "that it has"
        )
    return {t: stored for tensors in found.values() for t, stored in tensors.items()}


def check_complete(source: str, model: Any, report: Mapping[str, Any]) -> None:
    """Raise `ModelError` unless the checkpoint has the weights of this model, and no others.

    `report`: what transformers says of loading it. A tensor outside of the model's layers changes
    no logits, as those of a classifier's head or of another part of a multimodal model: there is
    a warning.
    """
    wrong = sorted(report["mismatched_keys"])
    if wrong:
        name, stored, wanted = wrong[0]
        more = f", and {len(wrong) - 1} more tensors" if len(wrong) > 1 else ""
        raise ModelError(
            f"{source}: tensor {name} has shape {list(stored)}, and by config.json "
            f"{list(wanted)}{more}"
        )
    if report["missing_keys"]:
        raise ModelError(
            f"{source}: has no weights for {_listed(sorted(report['missing_keys']))}, which "
            f"config.json requires"
        )
    surplus = [name for name in sorted(report["unexpected_keys"]) if not COMPUTED.search(name)]
    config, num_layers = model.config, model.config.num_hidden_layers
    own = {name[: layer.start(1)] for name in model.state_dict() if (layer := _LAYER.search(name))}
    predicting = getattr(config, "num_nextn_predict_layers", None) or 0
    in_layers = []
    for name in surplus:
        layer = _LAYER.search(name)
        if layer is None or name[: layer.start(1)] not in own:
            continue
        if num_layers <= int(layer[1]) < num_layers + predicting:
            continue
        in_layers.append(name)
    if in_layers:
        raise ModelError(
            f"{source}: has tensors that a model of config.json has no place for: "
            f"{_listed(in_layers)}; num_hidden_layers is {num_layers}"
        )
    if surplus:
        log.warning(
            "%s: has tensors that a model of config.json has no place for, and that are not used: "
            "%s",
            source,
            _listed(surplus),
        )


def _listed(names: Collection[str]) -> str:
    some = ", ".join(list(names)[:3])
    return some if len(names) <= 3 else f"{some} … ({len(names)} in all)"


def _read_index(path: Path) -> dict[str, str]:
    try:
        tensors = json.loads(path.read_bytes())["weight_map"]
        if not isinstance(tensors, dict) or not all(
            isinstance(name, str) and Path(name).name == name for name in tensors.values()
        ):
            raise ValueError("its weight_map must be an object whose values are names of files")
    except (ValueError, LookupError, TypeError) as error:
        raise ModelError(f"{path}: cannot be read: {type(error).__name__}: {error}") from error
    return tensors


def _read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors by their names. Raises `ModelError` if the file is not whole."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 2 <= length <= _MOST_HEADER:
            raise ModelError(f"{path}: is no safetensors file")
        if size < 8 + length:
            raise ModelError(f"{path}: is cut off after {size} bytes, within its header")
        raw = file.read(length)
    try:
        header = {name: t for name, t in json.loads(raw).items() if name != "__metadata__"}
        end = max((int(tensor["data_offsets"][1]) for tensor in header.values()), default=0)
        tensors = {
            name: StoredTensor(str(tensor["dtype"]), tuple(map(int, tensor["shape"])), path)
            for name, tensor in header.items()
        }
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError(f"{path}: is no safetensors file: its header is damaged") from error
    if size != 8 + length + end:
        raise ModelError(
            f"{path}: has {size} bytes, and by its header {8 + length + end}: it is cut off or "
            "damaged"
        )
    return tensors
