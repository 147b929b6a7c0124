"""The scripts in `benchmarks`: each has to find the others, from whatever folder it is run."""

from __future__ import annotations

from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"
SCRIPTS = [
    path for path in sorted(FOLDER.rglob("*.py")) if '__name__ == "__main__"' in path.read_text()
]


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_puts_the_repository_root_on_the_path(path: Path) -> None:
    """Without this line it runs in the tests and by `-m`, and fails when it is run by its path."""
    text = path.read_text()
    if "\nfrom benchmarks" not in text:
        return
    depth = len(path.relative_to(FOLDER).parts)
    line = f"sys.path.insert(0, str(Path(__file__).parents[{depth}]))  # the repository root\n"
    assert line in text.partition("\nfrom benchmarks")[0]
