"""All threads of a server allocate from one heap."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

COUNT_HEAPS = """
import ctypes, sys, threading
from pathlib import Path
from gemserve.cli.one_heap import use_one_heap

use_one_heap()
libc = ctypes.CDLL(None)
libc.fopen.restype = ctypes.c_void_p
libc.malloc.restype = ctypes.c_void_p
gate = threading.Barrier(9)
def allocate():
    libc.malloc(1000)
    gate.wait()
for _ in range(8):
    threading.Thread(target=allocate).start()
gate.wait()
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
print(Path(sys.argv[1]).read_text().count("<heap nr="))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the C library is not glibc")
@pytest.mark.parametrize(("said", "expected"), [(None, 1), ("8", 8)])
def test_threads_share_one_heap(tmp_path: Path, said: str | None, expected: int) -> None:
    """Resident memory grew by 4% in an hour, while what was in use stayed the same."""
    environment = {name: value for name, value in os.environ.items() if name != "MALLOC_ARENA_MAX"}
    if said is not None:
        environment["MALLOC_ARENA_MAX"] = said
    counted = subprocess.run(
        [sys.executable, "-c", COUNT_HEAPS, f"{tmp_path}/heaps.xml"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    assert int(counted.stdout) == expected
