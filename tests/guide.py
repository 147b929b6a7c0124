"""The examples of docs/clients.md, taken from there and run as a reader would."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "clients.md"
ADDRESS = "http://127.0.0.1:8000"
NODE = Path(sys.executable).with_name("node")  # of the development packages, not the machine's
INTERPRETERS = {
    "python": (sys.executable, "-c"),
    "sh": ("bash", "-ec"),
    "js": (str(NODE), "--input-type=module", "-e"),
}


def examples(heading: str, language: str) -> list[str]:
    """The blocks of one language under a heading; "" is what stands before the first."""
    sections = re.split(r"^##+ (.*)$", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    titles = ["", *sections[1::2]]
    body = sections[::2][titles.index(heading)]
    return re.findall(rf"^```{language}\n(.*?)^```$", body, flags=re.MULTILINE | re.DOTALL)


def run_example(
    code: str,
    language: str,
    *,
    url: str,
    folder: Path,
    interpreter: tuple[str, ...] | None = None,
    environment: Mapping[str, str] | None = None,
) -> str:
    """Run it in `folder` against the server at `url`; its standard output."""
    code = code.replace(ADDRESS, url)
    # an installed script need not be on the path of whoever tests
    code = code.replace("gemserve-client ", f"{sys.executable} -m gemserve_client.cli.main ")
    done = subprocess.run(
        [*(interpreter or INTERPRETERS[language]), code],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd=folder,
        env={**os.environ, "GEMSERVE_URL": url, "PYTHONUTF8": "1", **(environment or {})},
        encoding="utf-8",
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout
