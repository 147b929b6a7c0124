""".github/workflows: what they repeat from the Makefile, the Dockerfile and CONTRIBUTING.md."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from tests.distribution.test_dockerfile import ROOT, _arguments

FILES = sorted((ROOT / ".github/workflows").glob("*.yml"))
TEXTS = {path.stem: path.read_text("utf-8") for path in FILES}
RELEASE: dict[str, Any] = yaml.safe_load(TEXTS["release"])
JOBS: dict[str, Any] = RELEASE["jobs"]


@pytest.mark.parametrize("name", TEXTS)
def test_actions_are_pinned_by_commit(name: str) -> None:
    """A tag can be moved to other code, which would then run with the right to publish."""
    used = re.findall(r"uses: (\S+)(.*)", TEXTS[name])
    assert used
    for action, comment in used:
        if not action.startswith("./"):
            assert re.fullmatch(r"[\w.-]+/[\w.-]+@[0-9a-f]{40}", action), action
            assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action


@pytest.mark.parametrize("name", TEXTS)
def test_every_make_target_exists(name: str) -> None:
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE))
    assert set(re.findall(r"\bmake ([\w-]+)", TEXTS[name])) <= targets


def test_no_job_has_more_rights_than_it_names() -> None:
    for text in TEXTS.values():
        assert yaml.safe_load(text)["permissions"] == {}
    assert all("permissions" in job for job in JOBS.values())
    assert JOBS["publish"]["permissions"] == {"id-token": "write"}


def test_nothing_is_published_that_was_not_tested() -> None:
    for name in ("publish", "attest", "image"):
        assert set(JOBS[name]["needs"]) == {"tests", "build", "try-package"}
    for name in ("publish", "image"):
        assert JOBS[name]["environment"] == "release"
        assert JOBS[name]["if"].startswith("vars.")


def test_the_image_s_arguments_are_the_dockerfile_s() -> None:
    (push,) = (
        step["with"] for step in JOBS["image"]["steps"] if "build-push" in step.get("uses", "")
    )
    names = {line.split("=")[0] for line in push["build-args"].splitlines()}
    assert names == {"VERSION", "DEVICE", "RAY", "TORCH_INDEX"}
    assert names <= _arguments().keys()


def test_contributing_says_what_to_switch_on() -> None:
    page = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    for variable in re.findall(r"vars\.(\w+)", TEXTS["release"]):
        assert f"`{variable}" in page, variable
