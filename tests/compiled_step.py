"""The compiled decode step in tests: which of them use it, and where it is compiled once for all.

`gemserve` compiles the step where there is a compiler. In tests there seems to be none, so that
what runs without a compiler is tested too, except within `compiled_step`.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from gemserve_kernels import native_library
from gemserve_kernels.cpu_step import SOURCE

NO_COMPILER = "no-compiler"
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="there is no compiler")


@contextmanager
def compiled_step() -> Iterator[None]:
    """Engines that are built meanwhile use the step, in this process and in those that it starts.

    Where there is no compiler they run layer by layer, as users' engines do there.
    """
    with pytest.MonkeyPatch.context() as patch:
        if os.environ["CXX"] == NO_COMPILER:
            patch.setenv("CXX", "g++")
        native_library.forget_libraries()
        try:
            with suppress(native_library.CannotCompile):
                _compile_once()
            yield
        finally:  # also of a fixture that skips its tests, because of the processor
            native_library.forget_libraries()


def _compile_once() -> None:
    """Of several processes that need the step now, one compiles it and the others wait."""
    folder = Path(os.environ["XDG_CACHE_HOME"]) / "gemserve" / "compiled"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        native_library.open_library(SOURCE)


def share_compiled(cache: Path, shared: Path) -> None:
    """`cache`, a folder for XDG_CACHE_HOME, has its compiled files in the folder `shared`."""
    shared.mkdir(mode=0o700, exist_ok=True)
    (cache / "gemserve").mkdir()
    (cache / "gemserve" / "compiled").symlink_to(shared)
