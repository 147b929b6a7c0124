"""Finds the files that are to be added: single ones, folders, patterns, and git repositories."""

from __future__ import annotations

import glob
import os
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from stat import S_ISREG

from gemserve.errors import LibraryError

_GIT_S = 60.0
# folders of which nobody asks: what tools have made from the files beside them
_SKIPPED = frozenset(
    (
        *(".git", ".hg", ".svn", "__pycache__", "node_modules", ".venv", ".tox", ".mypy_cache"),
        *(".ruff_cache", ".pytest_cache", ".idea", ".cache"),
    )
)


def find_files(given: Sequence[str]) -> Iterator[Path]:
    """All files that these paths and patterns name, absolute, each once.

    Of a folder in a git repository only files that git tracks, and else all but hidden ones.
    Raises `LibraryError` if a path names nothing, before the first file.
    """
    seen: set[Path] = set()
    for path in check_paths(given):
        for file in _within(path.absolute()) if os.path.isdir(path) else [path.absolute()]:
            if file not in seen:
                seen.add(file)
                yield file


def check_paths(given: Sequence[str]) -> list[Path]:
    """The files and folders that are named, with patterns resolved. Looks into no folder.

    Raises `LibraryError` if a path or a pattern names nothing.
    """
    found: list[Path] = []
    for each in given:
        is_pattern = glob.has_magic(each) and not os.path.exists(each)
        paths = sorted(glob.glob(each, recursive=True)) if is_pattern else [each]
        if not paths or not all(map(os.path.exists, paths)):
            raise LibraryError(f"{each}: there is no such file or folder")
        found += map(Path, paths)
    return found


def _within(folder: Path) -> Iterator[Path]:
    tracked = _tracked(folder)
    if tracked is not None:
        yield from filter(_is_own_file, tracked)
        return
    for parent, folders, files in os.walk(folder):
        folders[:] = sorted(f for f in folders if f not in _SKIPPED and not f.startswith("."))
        for name in sorted(files):
            path = Path(parent, name)
            if not name.startswith(".") and _is_own_file(path):
                yield path


def _is_own_file(path: Path) -> bool:
    """Also one that may not be looked at: it is left out by its name later."""
    try:
        return S_ISREG(path.lstat().st_mode)
    except PermissionError:
        return True
    except OSError:
        return False


def _tracked(folder: Path) -> list[Path] | None:
    """The files in a folder that git tracks; None: it is in no repository."""
    command = ["git", "-C", str(folder), "ls-files", "-z"]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_GIT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    names = [os.fsdecode(name) for name in done.stdout.split(b"\0") if name]
    # a folder that a repository ignores has no tracked files
    if done.returncode or not names:
        return None
    return [folder / name for name in sorted(names)]
