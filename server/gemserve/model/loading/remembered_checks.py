"""Remembers that a model has passed its checks, so that its next start on this machine is sooner.

Whether gemserve computes a model as it should follows from the model's files, the settings, the
code and the processor. A check that has passed for all of these leaves an empty file, whose name
is their hash, in the user's cache folder. Whoever changes any of them starts with the check again.
"""

from __future__ import annotations

import hashlib
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import torch

import gemserve
import gemserve_kernels

_MOST_REMEMBERED = 100
_CODE = (".py", ".cpp", ".h")
_OF_PROCESSOR = ("model name", "flags", "Features")  # lines of /proc/cpuinfo


def check_once(check: Callable[[], None], source: str, settings: object) -> None:
    """Call `check`, which raises if a model is not right, unless it has passed before.

    `source`: the model's file or folder; what else it names is checked each time. `settings`: all
    that the check depends on besides; they differ if their `repr` does.
    """
    path, mark = Path(source), None
    with suppress(OSError, RuntimeError):  # no home folder, or one that may not be looked into
        if path.exists():
            mark = _folder() / _key(path, repr(settings))
            if mark.exists() and _is_ours(mark.parent):
                return
    check()
    if mark is not None:
        with suppress(OSError):  # a folder that cannot be written to costs time, and nothing else
            mark.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            mark.touch()
            _forget_oldest(mark.parent)


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "gemserve" / "checked"


def _is_ours(folder: Path) -> bool:
    """Could nobody else have put the mark there?"""
    status = folder.stat()
    return status.st_uid == os.getuid() and not status.st_mode & 0o022


def _key(source: Path, settings: str) -> str:
    parts = [settings, str(torch.get_num_threads()), os.environ.get("CXX", ""), *_processor()]
    parts += [f"{name} {version(name)}" for name in ("torch", "transformers")]
    for package in (gemserve, gemserve_kernels):
        root = Path(str(package.__file__)).parent
        parts += _described(path for path in root.rglob("*") if path.suffix in _CODE)
    parts += _described(source.iterdir() if source.is_dir() else [source])
    return hashlib.sha256("\0".join(parts).encode("utf-8", "surrogateescape")).hexdigest()


def _described(paths: Iterable[Path]) -> Iterator[str]:
    """What changes if a file does, without reading it."""
    for path in sorted(paths):
        try:
            status = path.stat()
        except OSError:  # a link to nowhere
            yield f"{path} missing"
            continue
        yield f"{path.resolve()} {status.st_size} {status.st_mtime_ns} {status.st_ino}"


def _processor() -> list[str]:
    with suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return sorted({line for line in lines if line.startswith(_OF_PROCESSOR)})
    return [platform.processor()]


def _forget_oldest(folder: Path) -> None:
    marks = sorted(folder.iterdir(), key=lambda mark: mark.stat().st_mtime, reverse=True)
    for mark in marks[_MOST_REMEMBERED:]:
        mark.unlink(missing_ok=True)
