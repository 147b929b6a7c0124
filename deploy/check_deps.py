"""Asks PyPI for known weaknesses of the locked packages, and lists them: `make check-deps`.

It ends with 0 if nothing is known, with 1 if something is, and with 2 if it could not be found out.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from deploy.make_locks import LOCKS, ROOT, entries, lock_path, torch_requirement

SBOM = ROOT / "build" / "sbom.json"


def requirements(name: str) -> str:
    """A lock without hashes, with the release of torch that is pinned elsewhere."""
    pinned = [entry.split("\\")[0].strip() for _, entry in entries(lock_path(name).read_text())]
    return "\n".join([*pinned, torch_requirement()]) + "\n"


def audit(listed: Path) -> list[str] | None:
    """Known weaknesses as lines. None, with the reason on stderr: PyPI did not answer."""
    command = [
        *(sys.executable, "-m", "pip_audit", "--disable-pip", "--no-deps", "--format", "json"),
        *("--progress-spinner", "off", "--timeout", "60", "--requirement", str(listed)),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    try:
        report: dict[str, Any] = json.loads(done.stdout)
    except ValueError:
        print(done.stderr.strip()[-2000:], file=sys.stderr)
        return None
    skipped = [package["name"] for package in report["dependencies"] if "skip_reason" in package]
    if skipped:
        print(f"PyPI does not know {', '.join(skipped)}", file=sys.stderr)
        return None
    return [
        f"{package['name']} {package.get('version', '?')}: {found['id']}, "
        f"fixed in {', '.join(found['fix_versions']) or 'no release yet'}"
        for package in report["dependencies"]
        for found in package.get("vulns", ())
    ]


def write_sbom(listed: Path) -> int:
    """Write what the image has as a CycloneDX document. Return the number of packages."""
    SBOM.parent.mkdir(exist_ok=True)
    command = [
        *(sys.executable, "-m", "cyclonedx_py", "requirements", str(listed)),
        *("--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "application"),
        *("--output-reproducible", "--output-file", str(SBOM)),
    ]
    quiet = ["-W", "ignore"]  # of what a requirements file cannot tell
    subprocess.run([command[0], *quiet, *command[1:]], check=True)
    return len(json.loads(SBOM.read_text("utf-8"))["components"])


def main() -> int:
    outcome = 0
    with tempfile.TemporaryDirectory() as folder:
        for name in LOCKS:
            listed = Path(folder) / f"{name}.txt"
            listed.write_text(requirements(name), "utf-8")
            found = audit(listed)
            if found is None:
                print(f"deploy/{name}.lock: NOT AUDITED, see above", file=sys.stderr)
                return 2
            print(f"deploy/{name}.lock: {len(found)} known weaknesses")
            for line in found:
                print(f"  {line}")
            outcome = outcome or int(bool(found))
        image = Path(folder) / "image.txt"
        print(f"{SBOM.relative_to(ROOT)}: {write_sbom(image)} packages of the image")
    return outcome


if __name__ == "__main__":
    sys.exit(main())
