"""Writes deploy/*.lock, the exact packages of the image and of CI: `make lock` runs it.

Every file of each release is named by its hash, so that pip refuses a file that was exchanged.
torch and what only its CUDA build needs are left out: a CPU and a CUDA machine take different
files from different places. Makefile and Dockerfile pin torch's release, and torch pins the rest.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
OLDEST_PYTHON = "3.11"
IMAGE_EXTRAS = ("client", "gguf", "library", "otel", "pdf")
CUDA = r"torch|triton|nvidia-.*|cuda-.*"
HEADER = "# Written by `make lock`: do not edit. {about}\n"
# lock → what it is for, what it has, and the names that are left out. "ray" comes after "image",
# which has the rest of what it needs.
LOCKS: dict[str, tuple[str, tuple[str, ...], str]] = {
    "image": (
        "What the image has beside torch.",
        tuple(f"--extra={extra}" for extra in IMAGE_EXTRAS),
        CUDA,
    ),
    "ray": (
        "What the image has beside that with RAY=1.",
        tuple(f"--extra={extra}" for extra in (*IMAGE_EXTRAS, "ray")),
        CUDA,
    ),
    "dev": (
        "What `make setup LOCK=1` installs beside torch.",
        ("--extra=dev",),
        CUDA.replace("triton|", ""),  # the tests run its interpreter
    ),
    "build": ("What builds the wheel.", (), ""),
}


def lock_path(name: str) -> Path:
    return ROOT / "deploy" / f"{name}.lock"


def resolved(name: str) -> str:
    """The requirements of one lock as uv resolves them, for every platform."""
    _, options, _ = LOCKS[name]
    with tempfile.TemporaryDirectory() as folder:
        torch, build = Path(folder) / "torch.txt", Path(folder) / "build.in"
        torch.write_text(f"{torch_requirement()}\n")
        build.write_text("\n".join([*build_requirements(), "editables>=0.5"]))
        source = ROOT / "pyproject.toml" if options else build
        command = [
            *(sys.executable, "-m", "uv", "pip", "compile", str(source), *options),
            *("--universal", "--python-version", OLDEST_PYTHON, "--generate-hashes"),
            *("--constraint", str(torch), "--no-header", "--no-annotate", "--quiet"),
        ]
        return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def build_requirements() -> list[str]:
    with (ROOT / "pyproject.toml").open("rb") as file:
        requirements: list[str] = tomllib.load(file)["build-system"]["requires"]
    return requirements


def torch_requirement() -> str:
    """The release of torch that the Makefile pins."""
    found = re.search(r"^TORCH \?= (.*)$", (ROOT / "Makefile").read_text("utf-8"), re.MULTILINE)
    assert found is not None
    return found[1]


def entries(text: str) -> Iterator[tuple[str, str]]:
    """(name, lines) of each package of a lock, without comments."""
    kept = "".join(line for line in text.splitlines(True) if not line.lstrip().startswith("#"))
    for entry in re.split(r"^(?=\S)", kept, flags=re.MULTILINE):
        if name := re.match(r"[\w.-]+", entry):
            yield name[0].lower(), entry


def main() -> None:
    for name, (about, _, left_out) in LOCKS.items():
        if name == "ray":
            image = [package for package, _ in entries(lock_path("image").read_text("utf-8"))]
            left_out = "|".join([left_out, *map(re.escape, image)])
        found = entries(resolved(name))
        lines = [entry for package, entry in found if not re.fullmatch(left_out, package)]
        lock_path(name).write_text(HEADER.format(about=about) + "".join(lines), "utf-8")
        print(f"{lock_path(name).relative_to(ROOT)}: {len(lines)} packages")


if __name__ == "__main__":
    main()
