"""Where a model's calibration is kept: beside it, or in the user's cache."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from gemserve.errors import ConfigError

_FILE = "calibration.json"


def read_filter_layer(source: str, num_layers: int) -> int | None:
    """The calibrated filter layer of the model at a directory or hub id, if there is one.

    Raises `ConfigError` if the file that should tell does not, or not of a model like this.
    """
    for path in (_cached(source), Path(source) / _FILE):
        try:
            if path.is_file():
                return _read(path, num_layers)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error})") from error
    return None


def write_calibration(source: str, found: dict[str, object]) -> Path:
    """Write `found`, with its `filter_layer`, to where it will be read; says where that was.

    Beside the model, unless it is installed with gemserve or its folder cannot be written: then to
    the cache, which is read first. Raises `ConfigError`.
    """
    folder = Path(source)
    is_own = folder.is_relative_to(Path(__file__).parent)
    if folder.is_dir() and os.access(folder, os.W_OK) and not is_own:
        path = folder / _FILE
        _cached(source).unlink(missing_ok=True)
    else:
        path = _cached(source)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial")
        partial.write_text(json.dumps(found, indent=1) + "\n")
        partial.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written ({error})") from error
    return path


def _cached(source: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    where = Path(source)
    name = str(where.resolve()) if where.exists() else source
    return cache / "gemserve" / re.sub(r"[^\w.-]+", "--", name.strip("/")) / _FILE


def _read(path: Path, num_layers: int) -> int:
    try:
        layer = json.loads(path.read_text())["filter_layer"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: no readable filter_layer ({error})") from error
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise ConfigError(f"{path}: filter_layer={layer!r} must be an integer")
    if not 0 <= layer < num_layers:
        raise ConfigError(
            f"{path}: filter_layer={layer}: the model has {num_layers} layers; gemserve calibrate "
            "finds it anew"
        )
    return layer
