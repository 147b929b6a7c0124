"""Finds an adapter's folder below the server's adapter folder. No torch."""

from __future__ import annotations

import os
from pathlib import Path

from gemserve.errors import AdapterError


def find_folder(root: Path, path: str) -> Path:
    """Folder `path` below `root`. Raises `AdapterError` unless it is a plain folder there."""
    parts = Path(path).parts
    if not parts or Path(path).is_absolute() or ".." in parts or "\0" in path:
        raise AdapterError("must be relative to the server's adapter folder, without ..")
    folder = root
    for part in parts:
        folder = folder / part
        if os.path.islink(folder):
            raise AdapterError("symbolic links are not followed")
    if not os.path.isdir(folder):
        raise AdapterError("no such folder")
    return folder
