"""The processes of `gemserve serve --tensor-parallel 2`: what happens when one of them ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest

from tests.fakes import COMPLETIONS, wait_for

START_S = 240.0  # on a machine that is busy
# the whole program, but a step that hangs is noticed sooner
SERVE = """
import sys
from gemserve.engine.ranks import ranks
ranks.STUCK_S = 4.0
from gemserve.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:
        return False
    return state != "Z"


@dataclass(frozen=True)
class Replica:
    """A server process, and that of its rank 1."""

    server: subprocess.Popen[bytes]
    rank: int
    url: str

    def stream(self, prompt: str, act: Callable[[], None]) -> str:
        """The last event but one of a stream that `act` disturbs, or what cut it off."""
        body = {
            "model": "builtin",
            "prompt": prompt,
            "max_tokens": 4000,
            "ignore_eos": True,
            "stream": True,
        }
        with httpx.stream("POST", self.url + COMPLETIONS, json=body, timeout=60) as reply:
            lines = (line for line in reply.iter_lines() if line.startswith("data: "))
            next(lines)
            act()
            *_, last, end = lines
        assert end == "data: [DONE]"
        return last

    def answer_to_schema(self) -> object:
        """An answer whose tokens a grammar allows, which only rank 0 has."""
        schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
        body = {
            "model": "builtin",
            "messages": [{"role": "user", "content": "Hello"}],
            "max_tokens": 60,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": {**schema, "additionalProperties": False}},
            },
        }
        reply = httpx.post(f"{self.url}/v1/chat/completions", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        return json.loads(reply.json()["choices"][0]["message"]["content"])

    def report(self, prompt: str, **filter_options: object) -> dict[str, object]:
        """The filter's report about a prompt that is answered."""
        body = {"model": "builtin", "prompt": prompt, "max_tokens": 3, "filter": filter_options}
        reply = httpx.post(self.url + COMPLETIONS, json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        report: dict[str, object] = reply.json()["filter"]
        return report

    def health(self) -> int:
        return httpx.get(f"{self.url}/health", timeout=10).status_code

    def assert_nothing_is_left(self, status: int) -> None:
        assert self.server.wait(30) == status
        wait_for(lambda: not is_alive(self.rank), 10)


@contextmanager
def replica(*words: str) -> Iterator[Replica]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    known = {k: v for k, v in os.environ.items() if not k.startswith("GEMSERVE_")}
    server = subprocess.Popen(
        [
            sys.executable,
            "-c",
            SERVE,
            "serve",
            "--port",
            str(port),
            "--kv-memory",
            "64MiB",
            "--device",
            "cpu",
            "--tensor-parallel",
            "2",
            *words,
        ],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**known, "OMP_NUM_THREADS": "1"},
    )
    url, rank = f"http://127.0.0.1:{port}", 0
    try:
        ends_s = time.monotonic() + START_S
        while True:
            assert server.poll() is None
            assert time.monotonic() < ends_s
            try:
                if httpx.get(f"{url}/ready", timeout=10).json()["status"] == "ok":
                    break
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        children = Path(f"/proc/{server.pid}/task/{server.pid}/children").read_text()
        (rank,) = map(int, children.split())
        yield Replica(server, rank, url)
    finally:
        server.kill()
        server.wait()
        if rank and is_alive(rank):
            os.kill(rank, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("number", "within_s"),
    [
        (signal.SIGKILL, 5.0),
        (signal.SIGSTOP, 15.0),  # it hangs, which shows when a step takes too long
    ],
)
def test_a_lost_rank_ends_requests_and_then_the_server(number: int, within_s: float) -> None:
    with replica() as two:
        assert two.health() == 200
        started_s = time.monotonic()
        last = two.stream("Hello", lambda: os.kill(two.rank, number))
        assert time.monotonic() - started_s < within_s
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "engine_error"
        assert two.health() == 503
        two.assert_nothing_is_left(70)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_that_ends_while_nothing_runs_is_noticed() -> None:
    with replica() as two:
        answer = two.answer_to_schema()
        assert isinstance(answer, dict)
        assert answer.keys() == {"a"}
        os.kill(two.rank, signal.SIGKILL)
        wait_for(lambda: two.health() == 503, 5)
        two.assert_nothing_is_left(70)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_rank_0_alone_has_a_reader() -> None:
    with replica("--reader", "builtin", "--reader-memory", "64MiB") as two:
        text = "The copper kettle is in the pantry. " * 300
        seen = two.report(f"{text}\n\nWhere is the kettle?", fallback=False)
        assert (seen["applied"], seen["reader"]) == (True, "reader")
        assert two.report(f"{text}\n\nWho is there?", reader="self")["reader"] == "self"
        assert two.health() == 200


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)]
)
def test_ranks_end_with_the_server(number: int) -> None:
    with replica() as two:
        os.kill(two.server.pid, number)
        two.assert_nothing_is_left(-number if number == signal.SIGKILL else 143)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--tensor-parallel", "3"], "the model's 4 key heads cannot be shared equally by 3 ranks"),
        (["--tensor-parallel", "2", "--cpu-step", "on"], "cpu_step=on: not with tensor_parallel=2"),
        (["--tensor-parallel", "2", "--cache-dir", "x"], "cache_dir=x: not with tensor_parallel=2"),
        (["--tensor-parallel", "2", "--offload-layers", "2"], "offload_layers=2: not with"),
    ],
)
def test_what_ranks_cannot_do_is_refused_at_start(
    words: list[str], said: str, tmp_path: Path
) -> None:
    known = {k: v for k, v in os.environ.items() if not k.startswith("GEMSERVE_")}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    run = subprocess.run(
        [
            sys.executable,
            "-m",
            "gemserve.cli.main",
            "serve",
            "--port",
            port,
            *words,
            "--device",
            "cpu",
        ],
        capture_output=True,
        text=True,
        timeout=240,
        env=known,
        cwd=tmp_path,
    )
    assert run.returncode == 2
    assert said in run.stderr


@pytest.mark.slow
def test_one_process_imports_nothing_of_ranks() -> None:
    """The server of one process is as it was."""
    program = (
        "import sys, gemserve.engine.build, gemserve.cli.serve\n"
        "print([name for name in sys.modules if name.startswith('gemserve.engine.ranks')])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    assert run.stdout.strip() == "[]"
