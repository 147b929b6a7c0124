"""Is the core whole without its wings? Deletes each in turn from a copy, and runs the core's tests.

    python tests/without_wings.py
    python tests/without_wings.py library fleet

Its package and its folder of tests are deleted. The tests of the core are `TESTS`, of which none
may need a wing; what looks at all wings together is in `tests/distribution`. The variable JOBS is
the number of processes. The last line says what failed; the status is 1 if anything did.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
WINGS = ("dialects", "fleet", "lab", "library", "train")
TESTS = ("tests/unit", "tests/kernels", "tests/api")
JOBS = os.environ.get("JOBS", "2")


def without(wing: str, copy: Path) -> bool:
    """Whether the core's tests pass in a copy without this wing."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True)
    for name in listed.stdout.decode().rstrip("\0").split("\0"):
        if name.startswith((f"server/gemserve_{wing}/", f"tests/{wing}/")):
            continue
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    # Python imports it at each start: what is installed in editable mode would be found otherwise
    own = {str(ROOT / name) for name in ("server", "kernels", "clients")}
    (copy / "sitecustomize.py").write_text(
        f"import sys\n\nsys.path[:] = [path for path in sys.path if path not in {own}]\n"
    )
    folders = [str(copy / name) for name in ("server", "kernels", "clients")]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", JOBS, "--dist", "worksteal", *TESTS],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([*folders, str(copy)])},
    )
    return run.returncode == 0


def main() -> int:
    wings = sys.argv[1:] or WINGS
    failed = []
    for wing in wings:
        print(f"without gemserve_{wing}:", flush=True)
        with tempfile.TemporaryDirectory() as copy:
            if not without(wing, Path(copy)):
                failed.append(wing)
    print(f"the core fails without: {', '.join(failed) or 'none of ' + ', '.join(wings)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
