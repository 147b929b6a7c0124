"""An adapter on disk: a folder with a description in JSON and tensors as safetensors.

gemserve's files are `adapter.json` and `adapter.safetensors`. PEFT's `adapter_config.json` and
`adapter_model.safetensors` are read as they are. No other file is opened, no link is followed, and
nothing is unpickled.
"""

from __future__ import annotations

import hashlib
import json
import os
import stat
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save_file

from gemserve.errors import AdapterError, shown
from gemserve.model.base_model import BaseModel

FORMAT = 1
# of the base's fields, those that are no numbers
_TEXTS: dict[str, tuple[type, ...]] = {"architecture": (str,), "weights": (str, type(None))}
_OURS = ("adapter.json", "adapter.safetensors")
_PEFT = ("adapter_config.json", "adapter_model.safetensors")
_MAX_JSON_BYTES = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterFolder:
    """The content of a folder. `version` is a hash of its bytes.

    `base` is None for a PEFT folder, which does not describe its base model.
    """

    kind: str
    settings: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    base: BaseModel | None
    version: str


def read_folder(path: Path, max_bytes: int) -> AdapterFolder:
    """Read a folder. Raises `AdapterError` if a file is missing, broken, too large, or a link."""
    if not os.path.isdir(path) or os.path.islink(path):
        raise AdapterError("no such folder")
    ours, peft = (all(os.path.lexists(path / n) for n in names) for names in (_OURS, _PEFT))
    if not ours and not peft:
        raise AdapterError(
            f"must hold {' and '.join(_OURS)}, or PEFT's {' and '.join(_PEFT)}; only safetensors "
            "are read"
        )
    description_name, tensors_name = _OURS if ours else _PEFT
    description = _read(path / description_name, _MAX_JSON_BYTES)
    packed = _read(path / tensors_name, max_bytes)
    try:
        tensors = load(packed)
    except (SafetensorError, ValueError, KeyError) as error:
        raise AdapterError(f"{tensors_name}: not whole safetensors: {error}") from error
    version = hashlib.sha256(description + b"\0" + packed).hexdigest()[:16]
    stated = _parse(description_name, description)
    if not ours:
        kind = str(stated.get("peft_type"))
        return AdapterFolder(
            kind=f"peft {kind}", settings=stated, tensors=tensors, base=None, version=version
        )
    if "format" in stated and stated["format"] != FORMAT:
        raise AdapterError(
            f"{description_name}: format={shown(stated['format'])}: this version of gemserve reads "
            f"format {FORMAT}; make the adapter anew with gemserve adapter train or convert, or "
            "load it with the version that made it"
        )
    if stated.keys() != {"format", "type", "base", "settings"}:
        raise AdapterError(
            f"{description_name}: format={shown(stated.get('format'))}, fields "
            f"{shown(', '.join(sorted(stated)))}; this version reads format {FORMAT} with base, "
            "format, settings, type"
        )
    if not isinstance(stated["settings"], dict):
        raise AdapterError(f"{description_name}: settings must be an object")
    return AdapterFolder(
        kind=str(stated["type"]),
        settings=stated["settings"],
        tensors=tensors,
        base=_base(description_name, stated["base"]),
        version=version,
    )


def write_folder(
    path: Path,
    *,
    kind: str,
    settings: dict[str, Any],
    tensors: dict[str, torch.Tensor],
    base: BaseModel,
) -> None:
    """Make `path` a folder that `read_folder` reads, and replace files of these names.

    The description is written last, because a folder without one is not an adapter.
    """
    path.mkdir(parents=True, exist_ok=True)
    description = path / _OURS[0]
    description.unlink(missing_ok=True)
    packed = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    save_file(packed, path / _OURS[1])
    stated = {"format": FORMAT, "type": kind, "base": asdict(base), "settings": settings}
    description.write_text(json.dumps(stated, indent=2) + "\n")
    # safetensors lets the owner alone read the file
    (path / _OURS[1]).chmod(description.stat().st_mode & 0o777)


def _read(path: Path, max_bytes: int) -> bytes:
    if os.path.islink(path):
        raise AdapterError(f"{path.name}: symbolic links are not followed")
    try:
        # the file may have become a link or a pipe, so opening it must neither follow nor wait
        with open(path, "rb", opener=_open_plain) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise AdapterError(f"{path.name}: must be a file")
            if status.st_size > max_bytes:
                raise AdapterError(
                    f"{path.name}: has {status.st_size} bytes, the limit is {max_bytes}"
                )
            return file.read(status.st_size)
    except OSError as error:
        raise AdapterError(f"{path.name}: cannot be read: {error.strerror}") from error


def _open_plain(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK)


def _parse(name: str, content: bytes) -> dict[str, Any]:
    try:
        stated = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise AdapterError(f"{name}: not JSON: {error}") from error
    if not isinstance(stated, dict):
        raise AdapterError(f"{name}: must be an object")
    return stated


def _base(name: str, stated: object) -> BaseModel:
    wanted = {field.name for field in fields(BaseModel)}
    if not isinstance(stated, dict) or stated.keys() != wanted:
        raise AdapterError(f"{name}: base must have {', '.join(sorted(wanted))}")
    for field, value in stated.items():  # a value may be a list of lists of lists …
        kinds = _TEXTS.get(field, (int,))
        if type(value) not in kinds:
            must = " or ".join(kind.__name__ for kind in kinds).replace("NoneType", "null")
            raise AdapterError(f"{name}: base.{field}: must be {must}, not {type(value).__name__}")
    return BaseModel(**stated)
