"""Clients' own environments, which `make test-clients` installs under .venv-clients."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
PROGRAMS = HERE / "programs"
ROOT = HERE.parents[1] / ".venv-clients"
HOW = "`make test-clients` installs it"
LARGE = ("crewai",)
NODE = Path(sys.executable).with_name("node")
# Nothing is fetched, reported to anyone or read from the machine's user.
OFFLINE = {
    "AGENTOPS_API_KEY": "",
    "AGNO_TELEMETRY": "false",
    "ANONYMIZED_TELEMETRY": "false",
    "CREWAI_DISABLE_TELEMETRY": "true",
    "CREWAI_TRACING_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "HAYSTACK_TELEMETRY_ENABLED": "False",
    "HF_HUB_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "OPENAI_AGENTS_DISABLE_TRACING": "1",
    "OPENAI_API_KEY": "none",
    "PYTHONUTF8": "1",
}


def script_of(name: str, script: str) -> str:
    """A script of the client's environment; skips the test where there is none."""
    path = ROOT / name / "bin" / script
    if not path.exists():
        large = HOW.replace("clients", "clients LARGE=1")
        pytest.skip(f"{name}: {large if name in LARGE else HOW}")
    return str(path)


def python_of(name: str) -> tuple[str, ...]:
    return (script_of(name, "python"), "-c")


def node_modules(name: str) -> Path:
    """Packages of npm; skips the test where there are none."""
    folder = ROOT / name
    if not (folder / ".installed").exists() or not NODE.exists():
        pytest.skip(f"{name}: {HOW}, if npm's registry can be reached")
    return folder / "node_modules"


def offline_environment(home: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**kept, **OFFLINE, "HOME": str(home), "XDG_CACHE_HOME": str(home)}


class Worker:
    """A process in a client's environment that runs the functions of one program."""

    def __init__(self, python: str, program: Path, home: Path) -> None:
        self._log = (home / f"{program.stem}.log").open("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            [python, str(HERE / "worker.py"), str(program)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=home,
            env=offline_environment(home),
            encoding="utf-8",
        )

    def run(self, function: str, server: dict[str, str], timeout_s: float) -> str:
        """The traceback of the function, or an empty text."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(
            json.dumps({"function": function, "server": server}),
            file=self._process.stdin,
            flush=True,
        )
        ready, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self.close()
            return f"{function} gave no answer within {timeout_s} s\n{self._logged()}"
        error: str = json.loads(line)
        return error

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def _logged(self) -> str:
        self._log.seek(0)
        return self._log.read()[-4000:]

    def close_log(self) -> None:
        self._log.close()


class Workers:
    """One worker for each program, started when it is first needed."""

    def __init__(self, home: Path) -> None:
        self._home = home
        self._workers: dict[Path, Worker] = {}

    def run(
        self,
        environment: str,
        program: Path,
        function: str,
        server: dict[str, Any],
        timeout_s: float = 100,
    ) -> None:
        """Run a function of a program against a server; an error there fails the test here."""
        if program.suffix == ".mjs":
            error = self._run_javascript(environment, program, function, server, timeout_s)
        else:
            python = script_of(environment, "python")
            worker = self._workers.get(program)
            if worker is None or not worker.is_alive:
                if worker is not None:
                    worker.close_log()
                worker = self._workers[program] = Worker(python, program, self._home)
            error = worker.run(function, server, timeout_s)
        assert not error, error

    def _run_javascript(
        self,
        environment: str,
        program: Path,
        function: str,
        server: dict[str, Any],
        timeout_s: float,
    ) -> str:
        modules = self._home / "node_modules"
        if not modules.exists():
            modules.symlink_to(node_modules(environment))
        # packages are looked up beside the program
        copies = [self._home / path.name for path in (HERE / "runner.mjs", program)]
        copies[0].write_bytes((HERE / "runner.mjs").read_bytes())
        copies[1].write_bytes(program.read_bytes())
        done = subprocess.run(
            [str(NODE), *map(str, copies), function, json.dumps(server)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            cwd=self._home,
            env=offline_environment(self._home),
            encoding="utf-8",
            timeout=timeout_s,
            check=False,
        )
        return f"{done.stdout}{done.stderr}" or "it failed" if done.returncode else ""

    def close(self) -> None:
        for worker in self._workers.values():
            if worker.is_alive:
                worker.close()
            worker.close_log()
