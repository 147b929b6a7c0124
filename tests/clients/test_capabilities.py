"""What each client can do with the server: the functions of the files in `programs`.

A program's constants say where it runs and which of the server's interfaces it uses. A function is
named after the capability that it shows, and may go on with details (`typed_json_mode`).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.clients import servers
from tests.clients.capability_table import CAPABILITIES
from tests.clients.environments import PROGRAMS, Workers
from tests.clients.servers import CALL, DOCUMENT, FORECAST, TEXT, WEATHER, Answers, Place, texts
from tests.fakes import FILTERED, FakeCore

CORES: dict[str, Callable[[], FakeCore]] = {
    "chat": FakeCore,
    "stream": FakeCore,
    "typed_given": lambda: texts(FORECAST),
    "tools": lambda: texts(CALL, TEXT),
    "tools_and_schema": lambda: texts(CALL, FORECAST),
    "errors": FakeCore,
    "filter": FakeCore,
}
BUILTIN = ("typed", "forced_call")
KINDS = (*CAPABILITIES, "typed_given")


@dataclass(frozen=True, slots=True)
class Program:
    """A client's functions, read without importing what it imports."""

    path: Path
    title: str
    environment: str
    apis: tuple[str, ...]
    functions: tuple[str, ...]
    answers: dict[str, list[str]]  # the model's, where the client wants special ones
    faults: dict[str, str]  # the client's own, by function

    @classmethod
    def read(cls, path: Path) -> Program:
        text = path.read_text(encoding="utf-8")
        found = re.search(r'^(?:"""|// )(.+?)(?:"""|\.?)$', text, re.MULTILINE)
        assert found, f"{path.name}: the first line names the client"
        functions = re.findall(r"^(?:export async function|def) ([a-z]\w*)", text, re.MULTILINE)
        return cls(
            path=path,
            title=found[1].rstrip("."),
            environment=_constant(text, "ENVIRONMENT")[0],
            apis=_constant(text, "APIS"),
            functions=tuple(name for name in functions if _kind_of(name)),
            answers=_answers(text),
            faults=dict(re.findall(r"^(?:#|//) fault of the client: (\w+): (.+)$", text, re.M)),
        )


def _constant(text: str, name: str) -> tuple[str, ...]:
    found = re.search(rf"^(?:export const )?{name} = (.+)$", text, re.MULTILINE)
    assert found, name
    return tuple(re.findall(r'"([^"]+)"', found[1]))


def _answers(text: str) -> dict[str, list[str]]:
    found = re.search(r"^(?:export const )?ANSWERS = (\{.*?^\})", text, re.MULTILINE | re.DOTALL)
    answers: dict[str, list[str]] = ast.literal_eval(found[1]) if found else {}
    return answers


def _kind_of(function: str) -> str | None:
    fitting = [name for name in KINDS if f"{function}_".startswith(f"{name}_")]
    return max(fitting, key=len, default=None)


def _titled(program: Program, api: str) -> str:
    others = {"responses": "Responses", "compatible": "compatible provider"}
    return f"{program.title}, {others[api]}" if api in others else program.title


def _cases() -> Iterator[Any]:
    for path in sorted([*PROGRAMS.glob("*.py"), *PROGRAMS.glob("*.mjs")]):
        program = Program.read(path)
        for api in program.apis:
            for function in program.functions:
                capability = str(_kind_of(function)).removesuffix("_given")
                marks = [pytest.mark.capability(_titled(program, api), capability)]
                fault = program.faults.get(f"{api}_{function}") or program.faults.get(function)
                if fault:
                    marks.append(pytest.mark.xfail(strict=True, reason=fault))
                name = f"{path.stem}-{api}-{function}"
                yield pytest.param(program, api, function, id=name, marks=marks)


@pytest.mark.parametrize(("program", "api", "function"), list(_cases()))
def test_capability(
    program: Program,
    api: str,
    function: str,
    workers: Workers,
    tokenizer: Any,
    request: pytest.FixtureRequest,
) -> None:
    kind = _kind_of(function)
    assert kind is not None

    def run(root: str) -> None:
        place = Place(root, api).described()
        workers.run(program.environment, program.path, function, place)

    if kind in BUILTIN:
        run(request.getfixturevalue("builtin_url"))
        return
    if kind == "cancel":
        with _endless(tokenizer) as (core, root):
            run(root)
            assert core.cancelled.wait(5), "the server went on after the client had left"
        return
    answers = program.answers.get(function)
    core = texts(*answers) if answers else CORES[kind]()
    with servers.scripted(core, tokenizer) as root:
        run(root)
    _check(kind, core, tokenizer)


@contextmanager
def _endless(tokenizer: Any) -> Iterator[tuple[FakeCore, str]]:
    """A server whose answers begin and never end."""
    core = Answers([FILTERED, "Hé", "llo ", 60.0])
    with servers.scripted(core, tokenizer) as root:
        yield core, root


def _check(kind: str, core: FakeCore, tokenizer: Any) -> None:
    """What the server must have been told for the capability to mean anything."""
    prompts = [tokenizer.decode(request.prompt_ids) for request in core.requests]
    if kind in ("chat", "stream"):
        assert core.requests[0].sampling.max_tokens == 7
    if kind in ("tools", "tools_and_schema"):
        assert len(prompts) >= 2
        assert WEATHER in prompts[1]
    if kind == "filter":
        chosen = [request.filter for request in core.requests]
        assert {(each.method, each.keep) for each in chosen} == {("sieve", 512)}
        assert all(DOCUMENT[:60] in prompt for prompt in prompts)
