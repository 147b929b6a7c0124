"""Processes that Ray has started are found, also those of its own, and end with the server."""

from __future__ import annotations

import subprocess
import sys

from gemserve_fleet.replicas.descendants import end_processes, find_descendants
from tests.fakes import wait_for

PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'input()'])"


def test_grandchildren_are_found_and_ended() -> None:
    before = find_descendants()
    with subprocess.Popen([sys.executable, "-c", PARENT], stdin=subprocess.PIPE) as parent:
        wait_for(lambda: len(find_descendants() - before) == 2, 20)
        started = find_descendants() - before
        assert parent.pid in {pid for pid, _ in started}
        end_processes(started, 0.1)
        assert parent.wait(10) != 0
    assert not find_descendants() & started


def test_an_id_that_another_process_has_now_is_left_alone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        end_processes([(other.pid, "0")], 0.1)
        assert other.poll() is None
        other.communicate(b"\n")
    assert other.returncode == 0
