"""What `gemserve serve` does before it listens."""

import os
import subprocess
import sys

import pytest

from gemserve.engine.new_thread import call_in_new_thread
from gemserve.errors import ConfigError

# in a process of its own, because the number of OpenMP threads is set once
COUNT_THREADS = """
import os
import time
import torch
from gemserve.engine.new_thread import call_in_new_thread

count = lambda: len(os.listdir("/proc/self/task"))
before = count()
during = call_in_new_thread(lambda: (torch.rand(512, 512) @ torch.rand(512, 512), count())[1])
deadline = time.monotonic() + 10
while count() > before and time.monotonic() < deadline:  # they end a moment after their owner
    time.sleep(0.01)
print(during - before, count() - before)
"""


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="threads are counted in /proc")
def test_loading_leaves_no_openmp_threads_behind() -> None:
    """With two sets of OpenMP threads in a process, each step of the engine took twice as long."""
    process = subprocess.run(
        [sys.executable, "-c", COUNT_THREADS],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "4"},
    )
    during, after = map(int, process.stdout.split())
    assert during > 1, process.stderr  # its own thread, and what it has started
    assert after == 0


def test_errors_of_loading_are_raised() -> None:
    def load() -> None:
        raise ConfigError("--model=x: unknown")

    with pytest.raises(ConfigError, match="--model=x"):
        call_in_new_thread(load)
