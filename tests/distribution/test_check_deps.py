"""`make check-deps`: a registry that does not tell must not look like one that knows of nothing."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from deploy.check_deps import Audit, read_report, requirements
from deploy.make_locks import ROOT
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
    program = f"import pathlib; from deploy.sbom import *; print(write_sbom(pathlib.Path('{tmp_path}/s')))"
    done = subprocess.run([TOOLS, "-c", program], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
    listed = packages_of_sbom(json.loads((tmp_path / "s").read_text("utf-8")))
    assert listed == packages_of_lock(locked_for_image())
