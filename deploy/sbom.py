"""The list of the image's packages as a CycloneDX document, and what it is compared with.

`make check-deps` writes it, and compares it with the lock. This compares it with what is installed,
where the last words are how Python is started there:

    python -m deploy.sbom .venv/bin/python
    python -m deploy.sbom docker run --rm --entrypoint python gemserve
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.markers import Marker
from packaging.utils import canonicalize_name

from deploy.make_locks import CUDA, ROOT, entries, lock_path, torch_requirement

SBOM = ROOT / "build" / "sbom.json"
# what markers of the lock are about, in the image
_IMAGE = {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
_LIST_INSTALLED = (
    "import importlib.metadata as m; print(*(d.name + '==' + d.version for d in m.distributions()))"
)


@dataclass(frozen=True, slots=True)
class Package:
    """`hashes`: SHA-256 of each file of the release; none of torch, see `make_locks`."""

    name: str
    version: str
    hashes: frozenset[str] = frozenset()


def locked_for_image() -> str:
    """The entries of the image's lock that it installs, and torch, as a requirements file."""
    image = {**_IMAGE, "python_version": _python(), "python_full_version": f"{_python()}.0"}
    kept = [
        entry
        for _, entry in entries(lock_path("image").read_text("utf-8"))
        if (marker := _marker(entry)) is None
        or any(
            marker.evaluate({**image, "platform_machine": machine})
            for machine in ("x86_64", "aarch64")
        )
    ]
    return "".join([*kept, torch_requirement(), "\n"])


def packages_of_lock(text: str) -> set[Package]:
    return set(_packages_of_lock(text))


def packages_of_sbom(document: Mapping[str, Any]) -> set[Package]:
    return {
        Package(
            canonicalize_name(component["name"]),
            component["version"],
            frozenset(
                known["content"]
                for reference in component.get("externalReferences", ())
                for known in reference.get("hashes", ())
            ),
        )
        for component in document["components"]
    }


def write_sbom(path: Path = SBOM) -> list[str]:
    """Write what the image has. Return how it differs from the lock, which should be nothing."""
    path.parent.mkdir(exist_ok=True)
    locked = locked_for_image()
    with tempfile.TemporaryDirectory() as folder:
        listed = Path(folder) / "image.txt"
        listed.write_text(locked, "utf-8")
        command = [
            *(sys.executable, "-W", "ignore", "-m", "cyclonedx_py", "requirements", str(listed)),
            *("--pyproject", str(ROOT / "pyproject.toml"), "--mc-type", "application"),
            *("--output-reproducible", "--output-file", str(path)),
        ]
        subprocess.run(command, check=True)
    return differences(
        packages_of_sbom(json.loads(path.read_text("utf-8"))), packages_of_lock(locked), "the lock"
    )


def differences(listed: set[Package], there: set[Package], where: str) -> list[str]:
    """What is in one of both only, or in another version or with other files."""
    ours, theirs = ({package.name: package for package in each} for each in (listed, there))
    found = [f"{name}: twice in the SBOM" for name in _twice(listed)]
    for name in sorted(ours.keys() | theirs.keys()):
        one, other = ours.get(name), theirs.get(name)
        if one is None or other is None:
            found.append(f"{name}: {f'not in {where}' if other is None else 'not in the SBOM'}")
        elif one.version != other.version:
            found.append(f"{name}: {one.version} in the SBOM, {other.version} in {where}")
        elif one.hashes != other.hashes:
            found.append(f"{name}: other hashes in the SBOM than in {where}")
    return found


def differs_from_installed(listed: set[Package], installed: Sequence[str]) -> list[str]:
    """How an environment differs, of which `installed` has each `name==version`.

    gemserve itself and what torch brings for CUDA are not in the SBOM. Builds of torch for one
    device have a local version.
    """
    there = set()
    for text in installed:
        name, _, version = text.partition("==")
        name = canonicalize_name(name)
        if name == "torch" or not re.fullmatch(rf"gemserve|{CUDA}", name):
            there.add(Package(name, version.partition("+")[0] if name == "torch" else version))
    return differences({Package(p.name, p.version) for p in listed}, there, "the environment")


def _packages_of_lock(text: str) -> Iterator[Package]:
    for name, entry in entries(text):
        pinned = re.match(r"[^=\s]+==([^\s;\\]+)", entry)
        assert pinned is not None, entry
        hashes = frozenset(re.findall(r"--hash=sha256:([0-9a-f]{64})", entry))
        yield Package(canonicalize_name(name), pinned[1], hashes)


def _marker(entry: str) -> Marker | None:
    _, semicolon, marker = entry.splitlines()[0].rstrip("\\ ").partition(";")
    return Marker(marker) if semicolon else None


def _python() -> str:
    """The release of Python that the image has."""
    found = re.search(
        r"^ARG PYTHON_IMAGE=python:(\d+\.\d+)", (ROOT / "Dockerfile").read_text(), re.M
    )
    assert found is not None
    return found[1]


def _twice(packages: set[Package]) -> list[str]:
    names = [package.name for package in packages]
    return sorted({name for name in names if names.count(name) > 1})


def main() -> int:
    if len(sys.argv) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    ran = subprocess.run([*sys.argv[1:], "-c", _LIST_INSTALLED], check=True, stdout=subprocess.PIPE)
    listed = packages_of_sbom(json.loads(SBOM.read_text("utf-8")))
    found = differs_from_installed(listed, ran.stdout.decode().split())
    print(*found or [f"{len(listed)} packages are those of {SBOM.relative_to(ROOT)}"], sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
