"""Folders and paths that must not become adapters, and what their error says."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Spoil = Callable[[Path], object]


def stated(**changes: Any) -> Spoil:
    """Change the description; None leaves a field out."""

    def spoil(folder: Path) -> None:
        path = folder / "adapter.json"
        content = {**json.loads(path.read_text()), **changes}
        path.write_text(json.dumps({k: v for k, v in content.items() if v is not None}))

    return spoil


def base(**changes: Any) -> Spoil:
    def spoil(folder: Path) -> None:
        content = json.loads((folder / "adapter.json").read_text())
        stated(base={**content["base"], **changes})(folder)

    return spoil


def tensors(**changes: Callable[[torch.Tensor], torch.Tensor | None]) -> Spoil:
    """Change tensors of the prefix, or leave one out."""

    def spoil(folder: Path) -> None:
        path = folder / "adapter.safetensors"
        made = load_file(path)
        changed = {name: changes.get(name, lambda t: t)(tensor) for name, tensor in made.items()}
        save_file({n: t.contiguous() for n, t in changed.items() if t is not None}, path)

    return spoil


def filled(value: float) -> Callable[[torch.Tensor], torch.Tensor]:
    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor.view(-1)[5] = value
        return tensor

    return change


def description(text: str | bytes) -> Spoil:
    raw = text.encode() if isinstance(text, str) else text
    return lambda folder: (folder / "adapter.json").write_bytes(raw)


def instead(name: str) -> Spoil:
    """The weights as a file of another kind only; PEFT's description."""

    def spoil(folder: Path) -> None:
        (folder / "adapter.safetensors").rename(folder / name)
        (folder / "adapter.json").rename(folder / "adapter_config.json")

    return spoil


def linked(name: str) -> Spoil:
    """A file that is a link, to what would do."""

    def spoil(folder: Path) -> None:
        elsewhere = folder.parent / "elsewhere"
        elsewhere.mkdir()
        (folder / name).rename(elsewhere / name)
        (folder / name).symlink_to(elsewhere / name)

    return spoil


def no_file(folder: Path, name: str, make: Callable[[Path], object]) -> None:
    (folder / name).unlink()
    make(folder / name)


def cut(folder: Path) -> None:
    path = folder / "adapter.safetensors"
    path.write_bytes(path.read_bytes()[:-7])


WEIGHTS = "adapter.safetensors"
# name → how a prefix's folder is spoilt, and what is said
FOLDERS: dict[str, tuple[Spoil, str]] = {
    "another shape": (base(hidden_size=128), "another model: hidden_size 128, not 64"),
    "another architecture": (base(architecture="Other"), "'Other', not 'LlamaForCausalLM'"),
    "other weights": (base(weights="0123456789abcdef"), "weights '0123456789abcdef', not '"),
    "a base of another form": (stated(base={"a": 1}), "base must have architecture, head_dim"),
    "a base of other types": (base(num_layers="8"), "base.num_layers: must be int, not str"),
    "a base nested deeply": (base(num_layers=json.loads("[" * 900 + "]" * 900)), "not list"),
    "cut": (cut, "adapter.safetensors: not whole safetensors"),
    "empty": (lambda f: (f / WEIGHTS).write_bytes(b""), "not whole safetensors"),
    "a header that lies": (
        lambda f: (f / WEIGHTS).write_bytes(b"\xff" * 7 + b"\x00" + b"{}"),
        "not whole safetensors",
    ),
    "bin only": (instead("adapter_model.bin"), "only safetensors are read"),
    "pt only": (instead("adapter.pt"), "only safetensors are read"),
    "nothing": (lambda f: [p.unlink() for p in f.iterdir()], "must hold adapter.json"),
    "linked weights": (linked(WEIGHTS), "adapter.safetensors: symbolic links are not followed"),
    "a linked description": (linked("adapter.json"), "symbolic links are not followed"),
    "a pipe": (lambda f: no_file(f, WEIGHTS, os.mkfifo), "must be a file"),
    "a folder": (lambda f: no_file(f, WEIGHTS, Path.mkdir), "adapter.safetensors: "),
    "NaN": (tensors(keys=filled(float("nan"))), "'keys': holds NaN or infinite values"),
    "infinity": (tensors(values=filled(float("-inf"))), "'values': holds NaN or infinite"),
    "integers": (tensors(keys=lambda t: t.int()), "'keys': is torch.int32, must be floating"),
    "8 bits": (tensors(keys=lambda t: t.to(torch.float8_e4m3fn)), "is torch.float8_e4m3fn"),
    "too large for the model": (tensors(keys=lambda t: t.double() * 1e300), "values too large"),
    "another length": (tensors(keys=lambda t: t[:, :, 1:]), "has shape [4, 2, 7, 16]"),
    "a layer less": (tensors(keys=lambda t: t[1:], values=lambda t: t[1:]), "needs [4, 2, 7, 16]"),
    "a dimension less": (tensors(keys=lambda t: t[0]), "'keys': has shape [2, 7, 16]"),
    "of no length": (
        tensors(keys=lambda t: t[:, :, :0], values=lambda t: t[:, :, :0]),
        "a prefix of 0 positions: must be from 1",
    ),
    "a tensor less": (tensors(values=lambda t: None), "'values': missing"),
    "huge JSON": (description(b'{"a": "' + b"x" * (1 << 20) + b'"}'), "the limit is 1048576"),
    "deep JSON": (description("[" * 100_000), "adapter.json: not JSON"),
    "no JSON": (description(b"\xff\xfe{}"), "adapter.json: not JSON"),
    "a list": (description("[]"), "must be an object"),
    "another format": (stated(format=2), "format=2"),
    "no format": (stated(format=None), "this version reads format 1"),
    "a field more": (stated(**{"x" * 100_000: 1}), "this version reads format 1"),
    "an unknown type": (stated(type="magic" * 1000), "'magicmagic"),
    "no type": (stated(type=[]), "unknown; known are ntk, prefix, activation"),
    "settings of another form": (stated(settings=[]), "settings must be an object"),
    "another type": (stated(type="ntk"), "s': unknown; expected k, z_a, z_b"),
}
# Paths where `good` is a folder that would do, and `link` leads to it.
PATHS: dict[str, str] = {
    "../root/good": "without ..",
    "good/..": "without ..",
    "x/../good": "without ..",
    "/good": "must be relative",
    "//good": "must be relative",
    ".": "must be relative",
    "good\0": "must be relative",
    "link": "symbolic links are not followed",
    "away/good": "symbolic links are not followed",
    "nowhere": "no such folder",
    "good/adapter.json": "no such folder",
    "é🌍": "no such folder",
    "x" * 4096: "no such folder",
    "/".join("x" * 2048): "no such folder",
}
BAD_NAMES = ("", "-a", ".a", "_a", "a b", "a/b", "../a", "a:b", "é", "a\n", "a" * 65, "a\0")


def lay_out(root: Path) -> None:
    """Around the good folder in `root`."""
    (root / "link").symlink_to(root / "good")
    (root / "away").symlink_to(root)
