"""The load test's `main`. It names a missing library, because it needs more than the client."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import PurePath


def main(argv: Sequence[str] | None = None, *, program: str) -> int:
    """Return the exit status: 0, 1 if nothing was completed, 2 for bad arguments, 130 after Ctrl-C,
    143 after SIGTERM.

    `program` is what the user types before the arguments.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        from gemserve_client.load_test.measure import run

        return run(words, program)
    except ModuleNotFoundError as error:
        name = PurePath(program).name
        print(f"{name}: needs {error.name}: pip install 'gemserve[bench]'", file=sys.stderr)
        return 1
