"""Lists what the image has, and asks PyPI for known weaknesses of it: `make check-deps`.

`--advisories FILE --sha256 HASH` asks a saved archive instead (`saved_advisories`). Further
arguments go to pip-audit, such as `--vulnerability-service osv` for another service.

It ends with 0 if nothing is known, with 1 if something is or the list is not that of the lock, and
with 2 if PyPI did not tell.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.make_locks import LOCKS, ROOT, entries, lock_path, torch_requirement
from deploy.saved_advisories import Advisories, BadArchive, read_advisories
from deploy.sbom import SBOM, packages_of_lock, write_sbom


@dataclass(frozen=True, slots=True)
class Audit:
    """What PyPI knows. `gap`: why it does not know it of all packages, or None."""

    weaknesses: list[str]
    gap: str | None = None


def requirements(name: str) -> str:
    """A lock without hashes, with the release of torch that is pinned elsewhere."""
    pinned = [entry.split("\\")[0].strip() for _, entry in entries(lock_path(name).read_text())]
    return "\n".join([*pinned, torch_requirement()]) + "\n"


def audit_by(saved: Advisories, listed: str) -> Audit:
    """What a saved archive knows of a file of requirements."""
    packages = sorted((package.name, package.version) for package in packages_of_lock(listed))
    return Audit([line for package in packages for line in saved.weaknesses(*package)])


def audit(listed: Path, options: list[str]) -> Audit:
    command = [
        *(sys.executable, "-m", "pip_audit", "--disable-pip", "--no-deps", "--format", "json"),
        *("--progress-spinner", "off", "--timeout", "60", "--requirement", str(listed)),
        *options,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    return read_report(done.stdout, done.stderr)


def read_report(report: str, complaint: str) -> Audit:
    """What pip-audit's JSON says. Without JSON, the last line of `complaint` says why."""
    try:
        packages: list[dict[str, Any]] = json.loads(report)["dependencies"]
    except ValueError:
        *_, reason = complaint.strip().splitlines() or ["pip-audit said nothing"]
        return Audit([], reason[:300])
    unknown = [package["name"] for package in packages if "skip_reason" in package]
    gap = f"PyPI told nothing of {len(unknown)} of {len(packages)} packages" if unknown else None
    return Audit(
        [
            f"{package['name']} {package['version']}: {found['id']}, "
            f"fixed in {', '.join(found['fix_versions']) or 'no release yet'}"
            for package in packages
            for found in package.get("vulns", ())
        ],
        gap,
    )


def main() -> int:
    parser = argparse.ArgumentParser(prog="deploy.check_deps", description=__doc__)
    parser.add_argument("--advisories", type=Path, metavar="FILE")
    parser.add_argument("--sha256", default="", metavar="HASH")
    arguments, options = parser.parse_known_args()
    saved = None
    if arguments.advisories is not None:
        try:
            saved = read_advisories(arguments.advisories, arguments.sha256)
        except (OSError, BadArchive) as error:
            print(f"NOT AUDITED: {error}")
            return 2
        print(f"{arguments.advisories}: advisories until {saved.newest}")
    outcomes = {0}
    differences = write_sbom()
    print(f"{SBOM.relative_to(ROOT)}: {len(differences)} differences from deploy/image.lock")
    for line in differences:
        print(f"  {line}")
        outcomes.add(1)
    with tempfile.TemporaryDirectory() as folder:
        for name in LOCKS:
            listed = Path(folder) / f"{name}.txt"
            listed.write_text(text := requirements(name), "utf-8")
            found = audit(listed, options) if saved is None else audit_by(saved, text)
            if found.gap is not None:
                print(f"deploy/{name}.lock: NOT AUDITED: {found.gap}")
            else:
                print(f"deploy/{name}.lock: {len(found.weaknesses)} known weaknesses")
            for line in found.weaknesses:
                print(f"  {line}")
            outcomes |= {1 if found.weaknesses else 2 if found.gap else 0}
    return 1 if 1 in outcomes else max(outcomes)


if __name__ == "__main__":
    sys.exit(main())
