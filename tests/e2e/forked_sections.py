"""`benchmarks/gpu.py`, each section of which is forked from a process that has imported torch.

Importing torch and transformers anew takes longer than a section of a dry run. Otherwise a section
meets what a process of its own does: the same arguments, and no module of `benchmarks`.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
GIVEN_PATHS = sys.path[1:]  # without this script's folder


def run(command: Sequence[str], folder: Path, limit_s: float) -> str | None:
    """As `gpu.run`: why the section's script failed, or None. The caller's time limit is enough."""
    log_path = folder.parent / "worker.log"
    child = os.fork()
    if not child:
        os._exit(_run_script(list(command[1:]), log_path))
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    return None if status == 0 else f"status {status}; {log_path.read_text('utf-8')[-800:]}"


def _run_script(arguments: list[str], log_path: Path) -> int:
    """The exit status of a script, which is run as if this process were new."""
    with log_path.open("ab") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    for name in list(sys.modules):
        if name.split(".")[0] == BENCHMARKS.name:
            del sys.modules[name]
    sys.argv, sys.path = arguments, [str(Path(arguments[0]).parent), *GIVEN_PATHS]
    status = 0
    try:
        runpy.run_path(arguments[0], run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            print(ended.code, file=sys.stderr)
            status = 1
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    return status


if __name__ == "__main__":
    import gemserve.engine.build  # noqa: F401  # what the sections import, once

    sys.path[0] = str(BENCHMARKS)
    import gpu

    gpu.run = run
    gpu.main()
