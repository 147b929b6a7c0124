"""Where a model's calibration is kept: beside it, or in the user's cache."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

from gemserve.errors import ConfigError

_FILE = "calibration.json"


def read_filter_layer(source: str) -> int | None:
    """The calibrated filter layer of the model at a directory or hub id, if there is one.

    Raises `ConfigError` if the file that should tell does not.
    """
    for path in (Path(source) / _FILE, _cached(source)):
        if path.is_file():
            return _read(path)
    return None


def write_calibration(source: str, found: dict[str, object]) -> Path:
    """Write `found`, with its `filter_layer`, to where it will be read; says where that was."""
    path = Path(source) / _FILE
    if not (path.parent.is_dir() and os.access(path.parent, os.W_OK)):
        path = _cached(source)
        path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(found, indent=1) + "\n")
    partial.replace(path)
    return path


def _cached(source: str) -> Path:
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    where = Path(source)
    name = str(where.resolve()) if where.exists() else source
    return cache / "gemserve" / re.sub(r"[^\w.-]+", "--", name.strip("/")) / _FILE


def _read(path: Path) -> int:
    try:
        layer = json.loads(path.read_text())["filter_layer"]
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: no readable filter_layer ({error})") from error
    if isinstance(layer, bool) or not isinstance(layer, int):
        raise ConfigError(f"{path}: filter_layer={layer!r} must be an integer")
    return layer
