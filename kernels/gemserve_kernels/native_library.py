"""Compiles a C++ file for this machine's processor, once, and loads it."""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import time
from functools import cache
from pathlib import Path

import torch

log = logging.getLogger("gemserve.kernels")
_OPTIONS = ("-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
_TIMEOUT_S = 120


class CannotCompile(RuntimeError):
    """Raised with the reason if there is no compiler, or if it fails."""


@cache
def open_library(source: Path) -> ctypes.CDLL:
    """The compiled file, from the user's cache if it is there.

    torch must have been imported: the library shares its threads. Raises `CannotCompile`.
    """
    compiler = _find_compiler()
    library = _folder() / f"{source.stem}-{_key(source, compiler)}.so"
    if not library.is_file():
        started_s = time.monotonic()
        _compile(compiler, source, library)
        taken_s = time.monotonic() - started_s
        log.info("compiled %s in %.1f s; it is kept as %s", source.name, taken_s, library)
    try:
        _check_owner(library)
        return ctypes.CDLL(str(library))
    except OSError as error:
        raise CannotCompile(f"{library}: {error}") from error


def _find_compiler() -> list[str]:
    """The command in CXX, or GCC: another compiler's OpenMP would start threads beside torch's."""
    command = shlex.split(os.environ.get("CXX") or "g++")
    if shutil.which(command[0]) is None:
        raise CannotCompile(f"the compiler {command[0]} is not installed")
    return command


def _compile(compiler: list[str], source: Path, library: Path) -> None:
    try:
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=library.parent) as folder:
            made = Path(folder) / library.name
            command = [*compiler, *_OPTIONS, str(source), "-o", str(made)]
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", timeout=_TIMEOUT_S
            )
            if done.returncode:
                raise CannotCompile(f"{compiler[0]} fails: {done.stderr.strip()[-500:]}")
            made.rename(library)  # at once, in case another process does the same
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"{compiler[0]}: {error}") from error


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(base)) / "gemserve" / "compiled"


def _check_owner(library: Path) -> None:
    """Raise `OSError` if another user could have written the library."""
    for path in (library, library.parent):
        found = path.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError("another user may have written it")


def _key(source: Path, compiler: list[str]) -> str:
    """Changes with everything that the result depends on: code, options, processor, torch."""
    code = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    processor = torch.backends.cpu.get_cpu_capability() + platform.machine() + _processor()
    parts = (*code, *_OPTIONS, *compiler, processor, torch.__version__)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """The processor's own list of instructions: a cache may be on a disk that machines share."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
