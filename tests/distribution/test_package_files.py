"""What the wheel and the sdist have: a forgotten file fails only where there is no repository."""

from __future__ import annotations

import email
import re
import subprocess
import sys
import tarfile
import zipfile
from email.message import Message
from importlib.util import find_spec
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import gemserve
from tests.distribution.test_dockerfile import ROOT, _project

WINGS = ("dialects", "fleet", "lab", "library", "train")
FOLDERS = {
    "gemserve": "server",
    **{f"gemserve_{wing}": "server" for wing in WINGS},
    "gemserve_kernels": "kernels",
    "gemserve_client": "clients",
}
PACKAGES = tuple(FOLDERS)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a wheel and an sdist of this checkout."""
    if find_spec("hatchling") is None or find_spec("hatch_vcs") is None:
        pytest.skip("hatchling and hatch-vcs are not installed: make test-package builds the wheel")
    folder = tmp_path_factory.mktemp("made")
    command = [sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-t", "wheel"]
    done = subprocess.run(
        [*command, "-d", str(folder)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return folder


def in_wheel(folder: Path) -> set[str]:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return set(archive.namelist())


def in_sdist(folder: Path) -> set[str]:
    (sdist,) = folder.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        return {member.name.partition("/")[2] for member in archive if member.isfile()}


def metadata(folder: Path) -> Message:
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return email.message_from_bytes(archive.read(name))


def tracked(package: str) -> set[str]:
    """The files of a package in git, as a wheel names them."""
    folder = FOLDERS[package]
    done = subprocess.run(
        ["git", "ls-files", f"{folder}/{package}"], cwd=ROOT, capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip("this is no clone, so nothing says which files belong to it")
    return {name.removeprefix(f"{folder}/") for name in done.stdout.splitlines()}


def test_the_wheel_has_the_packages_and_nothing_else(made: Path) -> None:
    names = {name for name in in_wheel(made) if ".dist-info/" not in name}
    assert {name.split("/")[0] for name in names} == set(PACKAGES)
    for package in PACKAGES:
        assert tracked(package) <= names
        assert f"{package}/py.typed" in names
    assert not {name for name in names if re.search(r"(^|/)(tests?|recipes|benchmarks)/", name)}


def test_the_wheel_stays_small(made: Path) -> None:
    """9 MB of it are the built-in model's weights."""
    (wheel,) = made.glob("*.whl")
    assert wheel.stat().st_size < 12e6


def test_the_sdist_builds_the_same_wheel(made: Path, tmp_path: Path) -> None:
    names = in_sdist(made)
    assert {"pyproject.toml", "PKG-INFO", "README.md", "LICENSE", "SECURITY.md"} <= names
    assert not {name for name in names if name.startswith(("tests/", "recipes/", "benchmarks/"))}
    (sdist,) = made.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    (unpacked,) = tmp_path.iterdir()
    again = tmp_path / "again"
    command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(again)]
    subprocess.run(command, cwd=unpacked, check=True, capture_output=True)
    assert in_wheel(again) == in_wheel(made)
    assert metadata(again)["Version"] == metadata(made)["Version"]


def test_the_base_has_what_a_server_needs_and_nothing_of_evaluations(made: Path) -> None:
    """`pip install gemserve` alone used to have no server."""
    base = {
        requirement.name
        for requirement in map(Requirement, metadata(made).get_all("Requires-Dist", []))
        if requirement.marker is None
    }
    assert {"torch", "transformers", "fastapi", "uvicorn", "llguidance", "gguf"} <= base
    evaluation = {"matplotlib", "bm25s", "rapidfuzz", "rouge", "accelerate", "peft", "openai"}
    assert not base & evaluation


def test_names_of_extras_stay() -> None:
    """A name that is gone is only a warning of pip's, and then a package that is missing."""
    extras = set(_project()["project"]["optional-dependencies"])
    wanted = {"cuda", "ray", "pdf", "otel", "smollm2"}
    earlier = {"server", "client", "flash", "flash4", "eval", "lora", "gguf", "train", "bench"}
    assert wanted | earlier <= extras


def test_the_version_is_one_that_installers_take() -> None:
    from packaging.version import Version

    assert str(Version(gemserve.__version__)) == gemserve.__version__
    if find_spec("hatch_vcs") is None:
        pytest.skip("hatch-vcs is not installed")
    done = subprocess.run(
        [sys.executable, "-m", "hatchling", "version"], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    Version(done.stdout.strip().splitlines()[-1])
