"""deploy/*.lock fit pyproject.toml; a lock that was forgotten would build another image."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from deploy.make_locks import IMAGE_EXTRAS, LOCKS, ROOT, entries, lock_path
from gemserve.files.formats import FORMATS

HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}(?: \\)?$", re.MULTILINE)


def pins(name: str) -> dict[str, list[str]]:
    """Package → its versions, of which markers choose one."""
    found: dict[str, list[str]] = {}
    for package, entry in entries(lock_path(name).read_text("utf-8")):
        pinned = re.match(r"[^=\s]+==([^\s;]+)", entry)
        assert pinned is not None, entry.splitlines()[0]
        found.setdefault(canonicalize_name(package), []).append(pinned[1])
    return found


def project() -> dict[str, Any]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        return tomllib.load(file)


def wanted(name: str) -> list[Requirement]:
    """What pyproject.toml requires of a lock's packages."""
    described = project()
    if name == "build":
        return [Requirement(text) for text in described["build-system"]["requires"]]
    extras = described["project"]["optional-dependencies"]
    if name == "ray":
        return [Requirement(text) for text in extras["ray"]]
    names = list(IMAGE_EXTRAS) if name == "image" else ["dev"]
    texts = list(described["project"]["dependencies"])
    for extra in names:
        for text in extras[extra]:
            requirement = Requirement(text)
            if requirement.name == described["project"]["name"]:
                names.extend(requirement.extras)
            else:
                texts.append(text)
    return [Requirement(text) for text in texts]


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_has_what_the_project_requires(name: str) -> None:
    pinned = pins(name)
    for requirement in wanted(name):
        if requirement.name == "torch":
            continue
        versions = pinned[canonicalize_name(requirement.name)]
        assert all(map(requirement.specifier.contains, versions)), requirement


def test_the_image_reads_every_format() -> None:
    """It left out HTML, DOCX and EPUB, and advised to install a package, which nobody can there."""
    assert {package for each in FORMATS.values() for package in each.needs} <= pins("image").keys()


@pytest.mark.parametrize("name", LOCKS)
def test_every_file_of_a_lock_has_its_hash(name: str) -> None:
    found = list(entries(lock_path(name).read_text("utf-8")))
    assert found
    for _, entry in found:
        _, *hashes = entry.splitlines()
        assert hashes, entry
        assert all(HASH.search(line) for line in hashes), entry


@pytest.mark.parametrize("name", LOCKS)
def test_a_lock_names_neither_torch_nor_a_place(name: str) -> None:
    """A CPU image would take gigabytes of CUDA, and others cannot reach every index."""
    assert not {n for n in pins(name) if re.match(r"torch$|nvidia|cuda", n)}
    text = lock_path(name).read_text("utf-8")
    assert "://" not in text
    assert "index" not in re.sub(r"^\S+", "", text, flags=re.MULTILINE)


def test_the_image_s_packages_are_those_that_are_tested() -> None:
    """Two releases of one package would mean that the image's was never tested."""
    tested = pins("dev")
    image, ray = pins("image"), pins("ray")
    for package, versions in {**image, **ray}.items():
        assert tested.get(package, versions) == versions
    assert not image.keys() & ray.keys()  # the second one would replace what the first installed
