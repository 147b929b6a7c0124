"""Does every Triton kernel give what its plain twin gives? Runs tests/kernels on this device.

One row for each file of tests. The tests of mutants are about the tests, and are left out.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.shared import results

ROOT = Path(__file__).resolve().parents[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", default="test_*.py", help="a pattern (default: %(default)s)")
    results.add_row_options(parser)
    arguments = parser.parse_args()
    rows = results.Rows(arguments)
    status = 0
    for path in sorted((ROOT / "tests" / "kernels").glob(arguments.files)):
        rows.attempt({"file": path.name}, lambda path=path: count_outcomes(path))
        status = status or int(bool(rows[-1].get("failed", 1)))
    results.finish("kernel_tests", arguments.device, rows, arguments.json)
    sys.exit(status)


def count_outcomes(path: Path) -> dict[str, int]:
    """How many tests of a file have passed, failed and been skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", str(path), "-k", "not mutants"]
        command += ["-m", "not slow", f"--junitxml={report}"]
        done = subprocess.run(command, cwd=ROOT, text=True, stdout=subprocess.PIPE, check=False)
        print(done.stdout[-4000:], file=sys.stderr)
        if not report.exists():
            raise RuntimeError(f"pytest ended with status {done.returncode}: {done.stdout[-800:]}")
        cases = ElementTree.parse(report).getroot().iter("testcase")
        kinds = Counter(next((child.tag for child in case), "passed") for case in cases)
    failed = kinds["failure"] + kinds["error"]
    return {"passed": kinds["passed"], "failed": failed, "skipped": kinds["skipped"]}


if __name__ == "__main__":
    main()
