"""Finds the commands of a page, and runs them as a reader would: in their order, in one folder.

A page's blocks of `sh` and `python` are run. A server that the last line of a block starts runs on
beside the blocks that follow, until the next server or the page's end. What a comment in the line
above a block says changes that:

- `<!-- not run: REASON -->`: it is not run; the reason is one of `REASONS`;
- `<!-- minutes -->`: it is run with all others by `make test-docs` only;
- `<!-- an error is meant -->`: its output may hold an error of the server.

If a block of `text` follows, its first line must be in the output.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gemserve.model.loading.loader import BUILTIN_PATH

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    DOCS / "index.md",
    DOCS / "start.md",
    DOCS / "how-it-works.md",
    DOCS / "serving.md",
    DOCS / "operations.md",
    DOCS / "several-machines.md",
    *sorted((DOCS / "guides").glob("*.md")),
    *sorted((DOCS / "choosing").glob("*.md")),
]
REASONS = ("the package index", "Docker", "Kubernetes", "several machines", "a GPU", "a model hub")
RUN = ("sh", "python")
SHOWN = ("text", "json", "yaml", "ini", "toml")
MARKS = {"minutes": "takes_minutes", "an error is meant": "may_fail"}
SERVED_ON = "8000"  # in the pages; servers of a test take a free port
MODEL = "/path/to/model"  # in the pages; a copy of the built-in model here
START_S, BLOCK_S, STOP_S = 180.0, 540.0, 60.0
STOPPED = 128 + signal.SIGTERM  # the exit status of a server that was told to end


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """`shown`: the first line of a text that follows, which the output must have."""

    line: int
    language: str
    text: str
    reason: str | None = None
    takes_minutes: bool = False
    may_fail: bool = False
    shown: str | None = None


def blocks_of(page: Path) -> list[Block]:
    """All fenced blocks of a page. Raises `ValueError` for a language or mark that is not known."""
    lines = page.read_text("utf-8").splitlines()
    found: list[Block] = []
    at = 0
    while at < len(lines):
        if not lines[at].startswith("```"):
            at += 1
            continue
        place = f"{page.relative_to(ROOT)}:{at + 1}"
        end = next(i for i in range(at + 1, len(lines)) if lines[i] == "```")
        language, text = lines[at].removeprefix("```"), lines[at + 1 : end]
        if language not in RUN + SHOWN:
            raise ValueError(f"{place}: {language!r}: must be one of {', '.join(RUN + SHOWN)}")
        if language == "text" and found and found[-1].language in RUN:
            found[-1] = replace(found[-1], shown=text[0])
        marks = _read_mark(lines[at - 1], place) if at else {}
        found.append(Block(line=at + 1, language=language, text="\n".join(text), **marks))
        at = end + 1
    return found


def _read_mark(line: str, place: str) -> dict[str, Any]:
    """What the comment above a block says, as fields of `Block`."""
    mark = re.fullmatch(r"<!-- (.*) -->", line.strip())
    if mark is None:
        return {}
    words = mark.group(1)
    if words.startswith("not run: "):
        reason = words.removeprefix("not run: ")
        if reason not in REASONS:
            raise ValueError(f"{place}: {reason!r}: must be one of {', '.join(REASONS)}")
        return {"reason": reason}
    if words not in MARKS:
        raise ValueError(f"{place}: {words!r}: must be 'not run: REASON', {', '.join(MARKS)}")
    return {MARKS[words]: True}


def split_server(text: str) -> tuple[str, str | None]:
    """The commands before a server that the last command starts, and that command, if any."""
    commands = re.split(r"(?<!\\)\n", text)
    if re.match(r"gemserve serve\b", commands[-1]) and "||" not in commands[-1]:
        return "\n".join(commands[:-1]), commands[-1]
    return text, None


class Reader:
    """Runs blocks in `folder`, which has nothing else in it. Close it: it may have a server."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "folder"
        self.folder.mkdir()
        self._bin = folder / "bin"
        self._bin.mkdir()
        self._write_programs()
        self._model = folder / "model"
        self._log = folder / "server.log"
        self._server: subprocess.Popen[bytes] | None = None
        self._port = free_port()
        self._environment = {
            # a server refuses settings that it does not know, such as those of tests
            **{k: v for k, v in os.environ.items() if not k.startswith("GEMSERVE_")},
            "PATH": f"{self._bin}:{os.environ['PATH']}",
            "XDG_CACHE_HOME": str(folder / "cache"),
            "GEMSERVE_URL": f"http://127.0.0.1:{self._port}",
            "PYTHONUTF8": "1",
        }

    def _write_programs(self) -> None:
        """The commands that an installation has, of the code that is tested."""
        for name, arguments in (
            ("python3", ""),
            ("gemserve", "-m gemserve.cli.main"),
            ("gemserve-client", "-m gemserve_client.cli.main"),
        ):
            program = self._bin / name
            program.write_text(f'#!/bin/sh\nexec {sys.executable} {arguments} "$@"\n')
            program.chmod(0o755)

    def run(self, block: Block) -> str:
        """What it printed on both outputs. Asserts that it succeeded."""
        text = re.sub(
            rf"(?<=:){SERVED_ON}\b|(?<=--port ){SERVED_ON}\b", str(self._port), block.text
        )
        if MODEL in text and not self._model.exists():
            shutil.copytree(BUILTIN_PATH, self._model)
        text = re.sub(rf"{MODEL}\b", str(self._model), text)
        if block.language == "python":
            return self._finish([sys.executable, "-c", text], block)
        text, server = split_server(text)
        output = self._finish(["bash", "-euo", "pipefail", "-c", text], block) if text else ""
        if server is not None:
            self._serve(server)
        return output

    def _finish(self, command: list[str], block: Block) -> str:
        done = subprocess.run(
            command,
            cwd=self.folder,
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            timeout=BLOCK_S,
            check=False,
        )
        assert done.returncode == 0, f"status {done.returncode}:\n{done.stdout}"
        assert block.may_fail or not re.search(r'\{"(?:type": "error|error": ?\{)', done.stdout), (
            f"the server refused:\n{done.stdout}"
        )
        if block.shown is not None:
            assert block.shown in done.stdout, f"{block.shown!r} is not in:\n{done.stdout}"
        return done.stdout

    def _serve(self, command: str) -> None:
        self._stop()
        with self._log.open("wb") as log:
            self._server = subprocess.Popen(
                ["bash", "-c", f"exec {command}"],
                cwd=self.folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        ends_s = time.monotonic() + START_S
        while not self._is_ready():
            status = self._server.poll()
            if status is not None:
                self._server = None
                raise AssertionError(f"the server ended with {status}:\n{self._log.read_text()}")
            assert time.monotonic() < ends_s, f"the server is not ready:\n{self._log.read_text()}"
            time.sleep(0.2)

    def _is_ready(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/ready", timeout=5) as reply:
                return bool(reply.status == 200)
        except (urllib.error.URLError, OSError):
            return False

    def _stop(self) -> None:
        if self._server is None:
            return
        server, self._server = self._server, None
        server.terminate()
        try:
            status = server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()
            raise
        assert status in (STOPPED, -signal.SIGTERM), f"{status}:\n{self._log.read_text()}"

    def close(self) -> None:
        self._stop()


def free_port() -> int:
    with socket.socket() as opened:
        opened.bind(("127.0.0.1", 0))
        return int(opened.getsockname()[1])
