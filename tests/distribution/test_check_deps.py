"""`make check-deps`: a registry that does not tell must not look like one that knows of nothing."""

from __future__ import annotations

import hashlib
import json
import subprocess
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from deploy.check_deps import Audit, audit_by, read_report, requirements
from deploy.make_locks import ROOT
from deploy.saved_advisories import BadArchive, read_advisories
from deploy.sbom import (
    Package,
    differences,
    differs_from_installed,
    locked_for_image,
    packages_of_lock,
    packages_of_sbom,
)

TOOLS = ROOT / ".venv-deps" / "bin" / "python"


def test_a_weakness_is_named_with_the_release_that_mends_it() -> None:
    vulns = [{"id": "PYSEC-1", "fix_versions": ["1.2", "2.0"]}, {"id": "X-2", "fix_versions": []}]
    report = {"dependencies": [{"name": "idna", "version": "1.0", "vulns": vulns}]}
    assert read_report(json.dumps(report), "").weaknesses == [
        "idna 1.0: PYSEC-1, fixed in 1.2, 2.0",
        "idna 1.0: X-2, fixed in no release yet",
    ]


def test_silence_is_no_good_news() -> None:
    """A mirror without PyPI's JSON interface answers 404 for every package."""
    packages = [
        {"name": "idna", "skip_reason": "Dependency not found on PyPI"},
        {"name": "tqdm", "version": "4.70.1", "vulns": []},
    ]
    found = read_report(json.dumps({"dependencies": packages}), "")
    assert found == Audit([], "PyPI told nothing of 1 of 2 packages")


def test_no_report_says_why() -> None:
    assert read_report("", "Traceback\nProxyError: no route\n") == Audit([], "ProxyError: no route")
    assert read_report("", "").gap == "pip-audit said nothing"


def archive_of(path: Path, *records: dict[str, Any]) -> str:
    """Write an archive as osv.dev has it; its hash."""
    with zipfile.ZipFile(path, "w") as archive:
        for record in records:
            archive.writestr(f"{record['id']}.json", json.dumps(record))
    return hashlib.sha256(path.read_bytes()).hexdigest()


def advisory(name: str, *events: dict[str, str], **fields: Any) -> dict[str, Any]:
    affected = {
        "package": {"ecosystem": "PyPI", "name": name},
        "ranges": [{"type": "ECOSYSTEM", "events": list(events)}],
    }
    return {"id": f"X-{name}", "modified": "2026-01-02", "affected": [affected], **fields}


@pytest.mark.parametrize(
    ("version", "is_known"),
    [("0.9", False), ("1.0", True), ("1.9.9", True), ("2.0", False), ("3.0", True), ("3.1", False)],
)
def test_a_saved_archive_knows_which_releases_are_weak(
    version: str, is_known: bool, tmp_path: Path
) -> None:
    events = ({"introduced": "1.0"}, {"fixed": "2.0"}, {"introduced": "3.0"}, {"fixed": "3.1"})
    withdrawn = advisory("tqdm", {"introduced": "0"}, withdrawn="2026-01-01")
    path = tmp_path / "all.zip"
    saved = read_advisories(path, archive_of(path, advisory("Ruamel.yaml", *events), withdrawn))
    found = audit_by(saved, f"ruamel-yaml=={version} ; python_version > '3'\ntqdm==1.0\n")
    weak = [f"ruamel-yaml {version}: X-Ruamel.yaml, fixed in 2.0, 3.1"]
    assert found == Audit(weak if is_known else [])
    assert saved.newest == "2026-01-02"


def test_the_last_release_that_is_weak_may_be_named_and_single_ones(tmp_path: Path) -> None:
    record = advisory("a", {"introduced": "0"}, {"last_affected": "1.5"})
    record["affected"][0]["versions"] = ["7"]
    path = tmp_path / "all.zip"
    saved = read_advisories(path, archive_of(path, record))
    weak = [version for version in ("1.5", "1.6", "7") if saved.weaknesses("a", version)]
    assert weak == ["1.5", "7"]


def test_another_archive_or_an_empty_one_is_no_good_news(tmp_path: Path) -> None:
    path = tmp_path / "all.zip"
    own = archive_of(path, advisory("a", {"introduced": "0"}))
    with pytest.raises(BadArchive, match=f"its SHA-256 is {own}, not 0"):
        read_advisories(path, "0" * 64)
    nothing = archive_of(path, {"id": "X", "affected": []})
    with pytest.raises(BadArchive, match="no advisory of a package of PyPI"):
        read_advisories(path, nothing)


def test_torch_is_asked_about_too() -> None:
    lines = requirements("image").splitlines()
    assert lines[-1].startswith("torch==")
    assert not any("hash" in line or "\\" in line for line in lines)


def test_the_list_has_what_a_linux_image_installs_and_nothing_else() -> None:
    """It had packages of Windows, and two releases of those that Python 3.11 needs older."""
    locked = packages_of_lock(locked_for_image())
    names = [package.name for package in locked]
    assert len(names) == len(set(names))
    assert {"torch", "numpy", "backports-zstd", "hf-xet"} <= set(names)
    assert "colorama" not in names
    assert [package.name for package in locked if not package.hashes] == ["torch"]


def test_every_difference_of_the_list_is_told() -> None:
    """A list that is of another build is worse than none."""
    locked = {Package("a", "1", frozenset("x")), Package("b", "2", frozenset("y"))}
    assert differences(locked, locked, "the lock") == []
    a, b = sorted(locked, key=lambda package: package.name)
    for listed, told in (
        ({a}, "b: not in the SBOM"),
        ({a, b, Package("c", "3")}, "c: not in the lock"),
        ({a, replace(b, version="3")}, "b: 3 in the SBOM, 2 in the lock"),
        ({a, replace(b, hashes=frozenset("z"))}, "b: other hashes in the SBOM than in the lock"),
        ({a, b, replace(b, version="3")}, "b: twice in the SBOM"),
    ):
        assert told in differences(listed, locked, "the lock")


def test_what_is_installed_is_compared_too() -> None:
    listed = {Package("torch", "2.13.0"), Package("ruamel-yaml", "1", frozenset("x"))}
    there = [
        "torch==2.13.0+cpu",
        "ruamel.yaml==1",
        "gemserve==0.1",
        "nvidia-cublas==12",
        "triton==3",
    ]
    assert differs_from_installed(listed, there) == []
    assert differs_from_installed(listed, [*there, "left-pad==1"]) == ["left-pad: not in the SBOM"]
    assert differs_from_installed(listed, there[:1]) == ["ruamel-yaml: not in the environment"]


@pytest.mark.skipif(not TOOLS.exists(), reason="make check-deps installs what writes the list")
def test_the_list_that_is_written_is_that_of_the_lock(tmp_path: Path) -> None:
    path = tmp_path / "sbom.json"
    program = (
        "import pathlib, sys\n"
        "from deploy.sbom import write_sbom\n"
        "print(write_sbom(pathlib.Path(sys.argv[1])))\n"
    )
    done = subprocess.run([TOOLS, "-c", program, path], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
    listed = packages_of_sbom(json.loads(path.read_text("utf-8")))
    assert listed == packages_of_lock(locked_for_image())
