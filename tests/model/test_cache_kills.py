"""A server is killed while it writes documents to disk: the next one starts clean and is right.

GEMSERVE_TEST_KILLS=50 kills as often; each takes some seconds.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from random import Random

import pytest

from gemserve.engine.reuse import disk as cache_disk
from tests.model.test_document_cache import random_ids
from tests.model.test_document_cache_disk import ask_after_restart, asked, files

NUM_KILLS = int(os.environ.get("GEMSERVE_TEST_KILLS", "1"))
# Writes one document after the other, slowly, so that it is killed in the middle of one.
WRITER = """
import sys
import time
from pathlib import Path

from gemserve.engine.cache.files import FileWriter
from tests.model.test_cache_kills import document_of
from tests.model.test_document_cache_disk import asked, disk_core, settle

add = FileWriter.add

def add_slowly(writer, data):
    time.sleep(0.02)
    add(writer, data)

FileWriter.add = add_slowly
core = disk_core(Path(sys.argv[1]), limit=2_000_000)
print("ready", flush=True)
for number in range(int(sys.argv[2]), 10**6):
    list(core.run_alone(asked(0, document_of(number))))
    settle(core)
"""


def document_of(number: int) -> list[int]:
    return random_ids(Random(number), 600)


def test_a_killed_server_leaves_nothing_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cache_disk, "_OVERHEAD_S", -1e9)  # loading always pays
    rng = Random(3)
    found = unfinished = 0
    for kill in range(NUM_KILLS):
        first = 1000 * kill
        writer = subprocess.Popen(
            [sys.executable, "-c", WRITER, str(tmp_path), str(first)],
            stdout=subprocess.PIPE,
            text=True,
        )
        assert writer.stdout is not None
        with writer.stdout:
            assert writer.stdout.readline() == "ready\n"
        time.sleep(rng.uniform(0.1, 1.5))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        unfinished += any(path.suffix == ".tmp" for path in files(tmp_path))
        for number in (first, first + 1):
            found += ask_after_restart(tmp_path, asked(1, document_of(number))) > 0
        assert not any(path.suffix == ".tmp" for path in files(tmp_path))
    with capsys.disabled():
        if NUM_KILLS > 2:
            print(f"{NUM_KILLS} kills: {unfinished} amid a write, {found} documents found after")
