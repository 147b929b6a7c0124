"""Coding agents as their users run them: a command in a folder, with the settings of the guide."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients.environments import HOW, NODE, OFFLINE, ROOT
from tests.guide import ADDRESS, examples

MODEL = "builtin"  # as the guide calls it
# Nothing listens there: an agent that asks the internet is refused at once.
NOWHERE = "http://127.0.0.1:9"
NPM = "coding-agents/node_modules"

Call = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class CodingAgent:
    """`heading` is its section of the guide, and `program` where its command lies.

    Its command line is `command`, the flags of a test, `ask`, the prompt and `flags`. `answers` is
    the path that it asks for answers. `tool` is the name of a tool that it offers to the model, and
    `reading` are that tool's arguments for a file. `again` goes on with the last conversation.
    `summarizes`: it makes a conversation shorter when the server refuses it. `typed` asks for an
    answer that fits a schema; `typing` is the tool by which it wants that answer, if it wants a
    call.
    """

    heading: str
    program: str
    command: tuple[str, ...]
    answers: str
    ask: tuple[str, ...] = ("-p",)
    environment: str = "coding-agents"
    flags: tuple[str, ...] = ()
    tool: str = ""
    reading: Callable[[Path], dict[str, str]] = lambda _: {}
    again: tuple[str, ...] = ("--continue",)
    summarizes: bool = False
    typed: Callable[[Path], tuple[str, ...]] | None = None
    typing: str = ""

    @property
    def name(self) -> str:
        return self.command[0]

    @property
    def settings(self) -> list[str]:
        """The guide's scripts: what it needs, and perhaps how it sends a filter."""
        return examples(self.heading, "sh")

    def call(self, path: Path) -> Call:
        return {"name": self.tool, "arguments": self.reading(path)}

    def is_offering_tools(self, prompt: str) -> bool:
        """Agents also ask for titles and the like, without tools."""
        return not self.tool or f'"name": "{self.tool}"' in prompt


def _schema(schema: Path) -> str:
    return schema.read_text(encoding="utf-8")


AGENTS = (
    CodingAgent(
        heading="Claude Code",
        program=f"{NPM}/@anthropic-ai/claude-code-*/claude",
        command=("claude",),
        answers="/v1/messages",
        flags=("--allowedTools", "Read", "Agent"),
        tool="Read",
        reading=lambda path: {"file_path": str(path)},
        typed=lambda schema: ("--json-schema", _schema(schema)),
        typing="StructuredOutput",
        summarizes=True,
    ),
    CodingAgent(
        heading="Codex",
        program=f"{NPM}/.bin/codex",
        command=("codex", "exec"),
        ask=("--skip-git-repo-check",),
        answers="/v1/responses",
        # its own sandbox needs rights that a container may not have
        flags=("--dangerously-bypass-approvals-and-sandbox",),
        tool="exec_command",
        reading=lambda path: {"cmd": f"cat {path}"},
        again=("resume", "--last"),
        typed=lambda schema: ("--output-schema", str(schema)),
    ),
    CodingAgent(
        heading="opencode",
        program=f"{NPM}/opencode-*/bin/opencode",
        command=("opencode", "run"),
        ask=(),
        answers="/v1/chat/completions",
        tool="read",
        reading=lambda path: {"filePath": str(path)},
        summarizes=True,
    ),
    CodingAgent(
        heading="Qwen Code",
        program=f"{NPM}/.bin/qwen",
        command=("qwen",),
        answers="/v1/chat/completions",
        flags=("--approval-mode", "yolo"),
        tool="read_file",
        reading=lambda path: {"file_path": str(path)},
        typed=lambda schema: ("--json-schema", _schema(schema)),
        typing="structured_output",
        summarizes=True,
    ),
    CodingAgent(
        heading="pi",
        program=f"{NPM}/.bin/pi",
        command=("pi", "--provider", "gemserve", "--model", MODEL),
        answers="/v1/chat/completions",
        tool="read",
        reading=lambda path: {"path": str(path)},
    ),
    CodingAgent(
        heading="Continue",
        program=f"{NPM}/.bin/cn",
        command=("cn",),
        answers="/v1/chat/completions",
        flags=("--auto",),
        tool="Read",
        reading=lambda path: {"filepath": str(path)},
        again=("--resume",),
    ),
    CodingAgent(
        heading="aider",
        environment="aider",
        program="aider/bin/aider",
        command=("aider", "--model", f"openai/{MODEL}", "--no-git", "--yes-always"),
        ask=("--message",),
        answers="/v1/chat/completions",
        flags=("--no-check-update", "--analytics-disable"),
        again=("--restore-chat-history",),
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Exchange:
    """A request as the server got it, and the status of its reply."""

    path: str
    key: str
    body: Any
    status: int


class Recorder:
    """Keeps what passes between agents and the application."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []

    def around(self, app: Any) -> Any:
        async def recorded(scope: Any, receive: Any, send: Any) -> None:
            body = bytearray()

            async def received() -> Any:
                message = await receive()
                body.extend(message.get("body", b""))
                return message

            async def sent(message: Any) -> None:
                if message["type"] == "http.response.start":
                    self._keep(scope, bytes(body), message["status"])
                await send(message)

            await app(scope, received, sent)

        return recorded

    def _keep(self, scope: Any, body: bytes, status: int) -> None:
        headers = dict(scope["headers"])
        key = headers.get(b"x-api-key") or headers.get(b"authorization", b"")
        exchange = Exchange(
            path=scope["path"],
            key=key.decode().removeprefix("Bearer "),
            body=json.loads(body) if body else None,
            status=status,
        )
        self.exchanges.append(exchange)


class Run:
    """An agent at work. `end` waits for it; nothing of it is left when the block ends."""

    def __init__(self, process: subprocess.Popen[bytes], log: Path) -> None:
        self._process = process
        self._log = log

    def end(self, timeout_s: float = 120) -> int:
        """Its exit status."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not within {timeout_s} s:\n{self.printed}") from None

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        self._process.wait(10)

    def _signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it may have ended by itself
            os.killpg(self._process.pid, number)  # a session of its own: what it started, too

    @property
    def printed(self) -> str:
        return self._log.read_text(encoding="utf-8", errors="replace")


@contextmanager
def running(
    agent: CodingAgent,
    prompt: str,
    *more: str,
    url: str,
    folder: Path,
    num_settings: int = 1,
    model: str = MODEL,
) -> Iterator[Run]:
    """The agent in `folder`, with a home of its own and the guide's first settings."""
    home, log = folder.with_name(f"{folder.name}-home"), folder.with_name(f"{folder.name}.log")
    environment = _environment(agent, home)
    lines = [*agent.settings[:num_settings], 'exec "$@"']
    code = "\n".join(lines).replace(ADDRESS, url).replace(MODEL, model)
    command = [word.replace(MODEL, model) for word in agent.command]
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["bash", "-ec", code, "bash", *command, *more, *agent.ask, prompt, *agent.flags],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env=environment,
            start_new_session=True,
        )
    run = Run(process, log)
    try:
        yield run
    finally:
        run.kill()


def _environment(agent: CodingAgent, home: Path) -> dict[str, str]:
    """Nothing of the tester's own: neither settings nor keys."""
    programs = sorted(ROOT.glob(agent.program), key=lambda path: len(str(path)))
    if not programs or not NODE.exists():
        pytest.skip(f"{agent.heading}: {HOW}, if the registry can be reached")
    commands = home / "bin"
    commands.mkdir(parents=True, exist_ok=True)
    command = commands / agent.name
    if not command.exists():  # a second run has the first one's home
        command.symlink_to(programs[0])
    return {
        **OFFLINE,
        "HOME": str(home),
        "HTTP_PROXY": NOWHERE,
        "HTTPS_PROXY": NOWHERE,
        "LANG": "C.UTF-8",
        "NO_PROXY": "127.0.0.1",
        "PATH": f"{commands}:{NODE.parent}:/usr/local/bin:/usr/bin:/bin",
        "TERM": "dumb",
        "TMPDIR": str(home),
    }
