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
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import torch

log = logging.getLogger("gemserve.kernels")
_OPTIONS = ("-O3", "-march=native", "-std=c++17", "-fno-math-errno", "-fopenmp", "-shared", "-fPIC")
_TIMEOUT_S = 120
_LEAST_GCC = 12  # the first that has __builtin_shufflevector
# Runs a command in a group of processes, all of which end when standard input does. A second shell
# waits for that. It must hold nothing that the command's output goes to.
_UNTIL_CLOSED = (
    'exec 9<&0; { read -r _ <&9; kill -KILL 0; } >/dev/null 2>&1 & exec "$@" </dev/null 9<&-'
)
_UNFINISHED = "unfinished-"  # folders of compilations that have not ended
_UNFINISHED_S = 10 * _TIMEOUT_S  # after which one never will
_NO_MEMORY = b"out of memory"  # as `native/failures.h` calls it


class CannotCompile(RuntimeError):
    """Raised with the reason if there is no compiler, or if it fails."""


def open_library(source: Path) -> ctypes.CDLL:
    """The compiled file, from the user's cache if it is there.

    torch must have been imported: the library shares its threads. Raises `CannotCompile`, without
    another trial if there was one.
    """
    found = _tried(source, os.environ.get("CXX", ""), _folder())
    if isinstance(found, str):
        raise CannotCompile(found)
    return found


def entry(library: ctypes.CDLL, name: str, *types: Any) -> Callable[..., None]:
    """A function of a library, which returns null or what went wrong (`native/failures.h`).

    Calls of it raise `MemoryError` or `RuntimeError` with that. `types`: of its arguments.
    """
    found = getattr(library, f"gemserve_{name}")
    found.restype, found.errcheck = ctypes.c_char_p, _raise_reason
    if types:
        found.argtypes = types
    made: Callable[..., None] = found
    return made


def _raise_reason(reason: bytes | None, function: Any, arguments: Any) -> None:
    if reason is not None:
        kind = MemoryError if reason == _NO_MEMORY else RuntimeError
        raise kind(f"{function.__name__}: {reason.decode(errors='replace')}")


def forget_libraries() -> None:
    """Try to open them anew, although neither the compiler's name nor the folder has changed."""
    _tried.cache_clear()


@cache
def _tried(source: Path, command: str, folder: Path) -> ctypes.CDLL | str:
    """The library, or why there is none. `command`: what CXX says."""
    try:
        return _open(source, command, folder)
    except (CannotCompile, OSError) as error:  # such as a folder that may not be looked into
        return str(error)


def _open(source: Path, command: str, folder: Path) -> ctypes.CDLL:
    compiler = _find_compiler(command)
    if _is_noexec(folder):  # else it would be compiled at each start, for nothing
        raise CannotCompile(
            f"{folder} is on a file system from which nothing may be run (noexec): set "
            "XDG_CACHE_HOME to a folder elsewhere"
        )
    library = folder / f"{source.stem}-{_key(source, compiler)}.so"
    if library.is_file():
        try:
            return _load(library)
        except OSError as error:
            log.warning("%s cannot be used, and is compiled anew: %s", library, error)
    started_s = time.monotonic()
    _compile(compiler, source, library)
    taken_s = time.monotonic() - started_s
    log.info("compiled %s in %.1f s; it is kept as %s", source.name, taken_s, library)
    try:
        return _load(library)
    except OSError as error:
        raise CannotCompile(f"{library}: {error}") from error


def _load(library: Path) -> ctypes.CDLL:
    """Raises `OSError`, also if another user could have written it."""
    _check_owner(library, library.parent)
    return ctypes.CDLL(str(library))


def _find_compiler(command: str) -> list[str]:
    """The command in CXX, or GCC: another compiler's OpenMP would start threads beside torch's."""
    try:
        words = shlex.split(command) or ["g++"]
    except ValueError as error:
        raise CannotCompile(f"CXX={command}: {error}") from error
    if shutil.which(words[0]) is None:
        raise CannotCompile(f"the compiler {words[0]} is not installed")
    return words


def _compile(compiler: list[str], source: Path, library: Path) -> None:
    try:
        library.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_owner(library.parent)
        _remove_unfinished(library.parent)
        with tempfile.TemporaryDirectory(dir=library.parent, prefix=_UNFINISHED) as folder:
            made = Path(folder) / library.name
            status, said = _call([*compiler, *_OPTIONS, str(source), "-o", str(made)], folder)
            if status:
                ended = f"was ended by signal {-status}" if status < 0 else "fails"
                if "__builtin_shufflevector" in said:
                    ended = f"is too old, GCC {_LEAST_GCC} or newer is needed"
                raise CannotCompile(f"{compiler[0]} {ended}: {said.strip()[-500:]}")
            with open(made, "rb+") as file:  # else the name may outlive a crash, and not the bytes
                os.fsync(file.fileno())
            made.chmod(0o700)  # the linker leaves it to others, too, if the user's mask does
            made.rename(library)  # at once, in case another process does the same
    except (OSError, subprocess.TimeoutExpired) as error:
        raise CannotCompile(f"{compiler[0]}: {error}") from error


def _call(command: list[str], folder: str) -> tuple[int, str]:
    """The exit status of a compiler, and what it said. Its temporary files are in `folder`.

    A compiler starts other programs. If it takes too long all of them are ended; one that is left
    would keep a processor busy, and `TimeoutExpired` is raised. They end with this process, too,
    however that ends: its end of the pipe is closed then.
    """
    theirs, ours = os.pipe()
    with (
        os.fdopen(theirs, "rb"),
        os.fdopen(ours, "wb"),
        subprocess.Popen(
            ["/bin/sh", "-c", _UNTIL_CLOSED, "sh", *command],
            stdin=theirs,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            env={**os.environ, "TMPDIR": folder},
            start_new_session=True,
        ) as process,
    ):
        try:
            _, said = process.communicate(timeout=_TIMEOUT_S)
        except BaseException:
            process.kill()
            raise
    return process.returncode, said


def _remove_unfinished(folder: Path) -> None:
    """Remove what processes have left that were killed while they compiled."""
    for path in folder.glob(f"{_UNFINISHED}*"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > _UNFINISHED_S:
                shutil.rmtree(path, ignore_errors=True)


def _folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(os.path.expanduser(base)) / "gemserve" / "compiled"


def _is_noexec(folder: Path) -> bool:
    there = next(path for path in (folder, *folder.parents) if path.exists())
    return bool(os.statvfs(there).f_flag & getattr(os, "ST_NOEXEC", 0))  # not every system has it


def _check_owner(*paths: Path) -> None:
    """Raise `OSError` if another user could have written one of them."""
    for path in paths:
        found = path.stat()
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError("another user may have written it")


def _key(source: Path, compiler: list[str]) -> str:
    """Changes with all that the result depends on: code, options, compiler, processor, torch."""
    code = [path.read_text() for path in (source, *sorted(source.parent.glob("*.h")))]
    processor = torch.backends.cpu.get_cpu_capability() + platform.machine() + _processor()
    program = Path(shutil.which(compiler[0]) or "").resolve()
    build = program.stat()  # another release of it has another size, time or name
    release = f"{program} {build.st_size} {build.st_mtime_ns}"
    parts = (*code, *_OPTIONS, *compiler, release, processor, torch.__version__)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _processor() -> str:
    """The processor's own list of instructions: a cache may be on a disk that machines share."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line for line in lines if line.startswith(("flags", "Features"))), "")
