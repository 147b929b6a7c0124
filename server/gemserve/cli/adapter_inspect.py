"""`gemserve adapter inspect PATH`: describe a folder. It needs no model and runs nothing."""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemserve.errors import AdapterError

if TYPE_CHECKING:
    import torch

    from gemserve.adapters.folder import AdapterFolder

MAX_BYTES = 1 << 40  # only servers have a limit
_PEFT = {"peft LORA": "lora", "peft PREFIX_TUNING": "prefix"}
_BY_LAYER = ("ntk", "prefix")  # kinds whose tensors begin with a dimension of layers


def add_command(actions: Any) -> None:
    parser = actions.add_parser("inspect", help="type, settings, parameters, shapes and norms")
    parser.add_argument("path", metavar="PATH", help="the adapter's folder")
    parser.add_argument("--json", action="store_true", help="end the output with a line of JSON")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from gemserve.adapters.folder import read_folder

    try:
        folder = read_folder(Path(arguments.path).resolve(), MAX_BYTES)
    except AdapterError as error:
        raise AdapterError(f"{arguments.path}: {error}") from error
    result = describe(folder)
    _print(result)
    if arguments.json:
        print(json.dumps(result, allow_nan=False))
    return 0


def describe(folder: AdapterFolder) -> dict[str, Any]:
    """A description as JSON.

    `norm` is None if it is not finite. `layer_norms` is None for tensors without layers.
    """
    tensors = [_describe(name, t, folder) for name, t in sorted(folder.tensors.items())]
    return {
        "type": _PEFT.get(folder.kind, folder.kind),
        "format": "peft" if folder.base is None else "gemserve",
        "version": folder.version,
        "base": None if folder.base is None else asdict(folder.base),
        "settings": _finite(folder.settings),
        "parameters": sum(tensor["parameters"] for tensor in tensors),
        "bytes": sum(t.numel() * t.element_size() for t in folder.tensors.values()),
        "tensors": tensors,
    }


def _describe(name: str, tensor: torch.Tensor, folder: AdapterFolder) -> dict[str, Any]:
    values = tensor.double()
    layers = values
    # [prefix, 2 · layers · …], with a key and a value for each layer
    if folder.kind == "peft PREFIX_TUNING":
        count: Any = folder.settings.get("num_layers")
        is_known = isinstance(count, int) and count > 0 and values.dim() == 2
        is_known = is_known and values.shape[1] % (2 * count) == 0
        layers = values.unflatten(1, (count, -1)).transpose(0, 1) if is_known else values[:0]
    elif folder.kind not in _BY_LAYER:
        layers = values[:0]
    norms = [_norm(layer) for layer in layers]
    return {
        "name": name,
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "shape": list(tensor.shape),
        "parameters": tensor.numel(),
        "not_finite": int((~values.isfinite()).sum()),
        "norm": _norm(values),
        "layer_norms": norms or None,
    }


def _norm(values: torch.Tensor) -> float | None:
    norm = float(values.norm())
    return norm if norm < float("inf") else None  # false for NaN, too


def _finite(settings: Any) -> Any:
    """Settings in which infinite and NaN numbers, which JSON lacks, are replaced by texts."""
    if isinstance(settings, dict):
        return {name: _finite(value) for name, value in settings.items()}
    if isinstance(settings, list):
        return [_finite(value) for value in settings]
    if isinstance(settings, float) and not -float("inf") < settings < float("inf"):
        return str(settings)
    return settings


def _print(result: dict[str, Any]) -> None:
    base, settings = (
        ", ".join(f"{key} {value}" for key, value in given.items() if value is not None)
        for given in (result["base"] or {}, result["settings"])
    )
    for name, value in (
        ("type", f"{result['type']} ({result['format']}'s format)"),
        ("version", result["version"]),
        ("base", base or "not said"),
        ("settings", settings or "none"),
        ("parameters", f"{result['parameters']:,} in {result['bytes']:,} bytes"),
    ):
        print(f"{name:<12}{value}")
    width = max((len(tensor["name"]) for tensor in result["tensors"]), default=0) + 2
    for tensor in result["tensors"]:
        wrong = f", {tensor['not_finite']} values not finite" if tensor["not_finite"] else ""
        print(
            f"{tensor['name']:<{width}}{tensor['dtype']:<10}{tensor['shape']!s:<22}"
            f"norm {_shown(tensor['norm'])}{wrong}"
        )
        if tensor["layer_norms"]:
            print(f"{'':<{width}}by layer: {' '.join(map(_shown, tensor['layer_norms']))}")


def _shown(norm: float | None) -> str:
    return "–" if norm is None else f"{norm:.4g}"
