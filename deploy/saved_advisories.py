"""Advisories from a file, for machines that reach no service that has them.

    make check-deps AUDIT="--advisories all.zip --sha256 HASH"

The file is the archive of PyPI's advisories that osv.dev offers (PyPI/all.zip): one JSON object in
OSV's format for each. It is compared with a SHA-256 hash, by which it was read and agreed on.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version


class BadArchive(ValueError):
    """The file is not the one that was meant, or has no advisories."""


@dataclass(frozen=True, slots=True)
class Advisories:
    """`by_package`: records by canonical name. `newest`: when the last of them was changed."""

    by_package: Mapping[str, list[dict[str, Any]]]
    newest: str

    def weaknesses(self, name: str, version: str) -> list[str]:
        """What is known of a release, as `check_deps.read_report` says it."""
        return [
            f"{name} {version}: {record['id']}, "
            f"fixed in {', '.join(_fixes(affected)) or 'no release yet'}"
            for record in self.by_package.get(canonicalize_name(name), ())
            for affected in _affected(record, name)
            if _is_affected(affected, version)
        ]


def read_advisories(path: Path, sha256: str) -> Advisories:
    """Raises `BadArchive`, also for an archive that knows of nothing."""
    content = path.read_bytes()
    found = hashlib.sha256(content).hexdigest()
    if found != sha256.lower():
        raise BadArchive(f"{path}: its SHA-256 is {found}, not {sha256}")
    by_package: dict[str, list[dict[str, Any]]] = {}
    newest = ""
    with zipfile.ZipFile(path) as archive:
        for member in archive.namelist():
            record = json.loads(archive.read(member)) if member.endswith(".json") else {}
            names = {
                canonicalize_name(affected["package"]["name"])
                for affected in record.get("affected", ())
                if affected.get("package", {}).get("ecosystem") == "PyPI"
            }
            if not names or "withdrawn" in record:
                continue
            newest = max(newest, record.get("modified", ""))
            for name in names:
                by_package.setdefault(name, []).append(record)
    if not by_package:
        raise BadArchive(f"{path}: has no advisory of a package of PyPI")
    return Advisories(by_package, newest)


def _affected(record: Mapping[str, Any], name: str) -> Iterator[dict[str, Any]]:
    for affected in record["affected"]:
        package = affected.get("package", {})
        is_it = canonicalize_name(package.get("name", "")) == canonicalize_name(name)
        if is_it and package.get("ecosystem") == "PyPI":
            yield affected


def _is_affected(affected: Mapping[str, Any], text: str) -> bool:
    if text in affected.get("versions", ()):
        return True
    return any(
        _is_within(listed["events"], Version(text))
        for listed in affected.get("ranges", ())
        if listed["type"] == "ECOSYSTEM"
    )


def _is_within(events: list[dict[str, str]], version: Version) -> bool:
    """Whether a version is in an OSV range: what it names last, up to the version, counts."""
    is_in = False
    for kind, at in sorted((_place(event) for event in events), key=lambda place: place[1]):
        if kind == "last_affected":
            is_in = is_in and version <= at
        elif version >= at:
            is_in = kind == "introduced"
    return is_in


def _place(event: Mapping[str, str]) -> tuple[str, Version]:
    ((kind, text),) = event.items()
    try:
        return kind, Version(text)
    except InvalidVersion:  # then it counts from the beginning on, or never as mended
        return kind, Version("0" if kind == "introduced" else "999999")


def _fixes(affected: Mapping[str, Any]) -> list[str]:
    ranges = (r for r in affected.get("ranges", ()) if r["type"] == "ECOSYSTEM")
    found = {event["fixed"] for listed in ranges for event in listed["events"] if "fixed" in event}
    return sorted(found)
