"""Runs the fuzz tests with random cases until the time is up: `python -m tests.fuzz MINUTES`.

Further arguments go to pytest. It ends with 1 as soon as a round has failed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

HERE = Path(__file__).parent
EXAMPLES = "100"  # of each test and round


def round_of(counts: Path, arguments: list[str]) -> int:
    """Run every test once. Return pytest's exit status."""
    environment = {
        "GEMSERVE_FUZZ_EXAMPLES": EXAMPLES,
        "GEMSERVE_FUZZ_COUNTS": str(counts),
        **os.environ,
    }
    command = [
        *(sys.executable, "-m", "pytest", "-q", "--no-header", "--timeout", "3600"),
        *(str(HERE), *arguments),
    ]
    return subprocess.run(command, env=environment, cwd=HERE.parents[1]).returncode


def main() -> int:
    minutes, *arguments = sys.argv[1:] or ["10"]
    started_s, total = time.monotonic(), Counter[str]()
    with tempfile.TemporaryDirectory() as folder:
        counts = Path(folder) / "counts.json"
        while (passed_s := time.monotonic() - started_s) < 60 * float(minutes):
            status = round_of(counts, arguments)
            total.update(json.loads(counts.read_text("utf-8")))
            print(f"{passed_s / 60:.0f} minutes: {json.dumps(total)}", flush=True)
            if status:
                return 1
    print(f"{total.total()} cases, nothing found")
    return 0


if __name__ == "__main__":
    sys.exit(main())
