"""Coding agents with no settings but those of the guide: address, key and model.

Models that fit into a test cannot act, so the answers are given, in the model's own text of a call.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gemserve.contract.events import Event
from gemserve.contract.requests import Request
from gemserve.errors import PromptTooLong
from tests.clients import servers
from tests.clients.coding_agents import AGENTS, CodingAgent, Recorder, running
from tests.clients.servers import FORECAST, TEXT, pieces
from tests.fakes import FILTERED, FakeCore, FakeJob, Step

CONTEXT = 200_000  # of instructions, tools and room for answers, some ask for 70,000
QUESTION = "Which keys hang beside the door?"
# What the files say: none of it is anywhere else.
FOUND = {"hall.txt": "The brass key opens 7314.", "yard.txt": "4429", "loft.txt": "8850"}
# How models write a call beside other text.
FORMS = (
    "Let me look at the first one.\n<tool_call>\nCALL\n</tool_call>",
    "<think>\nThe next one is due.\n</think>\n\n<tool_call>\nCALL\n</tool_call>",
    "<tool_call>\nCALL\n</tool_call>\nThat will tell.",
    "Now the fourth.\n\n<tool_call>\nCALL",
    "One is left.\n\n```json\nCALL\n```",
)
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "degrees": {"type": "integer"}},
    "required": ["city", "degrees"],
    "additionalProperties": False,
}


def of(agents: Sequence[CodingAgent], *capabilities: str) -> list[Any]:
    return [
        pytest.param(
            agent, id=agent.name, marks=pytest.mark.capability(agent.heading, *capabilities)
        )
        for agent in agents
    ]


CALLING = [agent for agent in AGENTS if agent.tool]
SUMMARIZING = [agent for agent in AGENTS if agent.summarizes]
TYPED = [agent for agent in AGENTS if agent.typed]
FILTERING = [agent for agent in AGENTS if len(agent.settings) > 1]


class Model(FakeCore):
    """Answers a prompt with tools as `answer` says, and any other with a title."""

    def __init__(self, agent: CodingAgent, tokenizer: Any, answer: Callable[[str], Any]) -> None:
        super().__init__()
        self.prompts: list[str] = []
        self._refused = ""
        self._agent = agent
        self._tokenizer = tokenizer
        self._answer = answer

    def refuse_next(self, text: str) -> None:
        """Find the next prompt with this text too long."""
        self._refused = text

    def check(self, request: Request) -> None:
        if self._refused and self._refused in self._tokenizer.decode(request.prompt_ids):
            self._refused = ""
            tokens = len(request.prompt_ids)
            raise PromptTooLong(tokens=tokens, limit=tokens - 100, param="messages")

    def _play(self, request: Request, job: FakeJob) -> Iterator[Event | None]:
        prompt = self._tokenizer.decode(request.prompt_ids)
        is_main = self._agent.is_offering_tools(prompt)
        if is_main:
            self.prompts.append(prompt)
        answer = self._answer(prompt) if is_main else "Keys"
        self.script = [FILTERED, *pieces(answer)] if isinstance(answer, str) else answer
        yield from super()._play(request, job)


@contextmanager
def serving(
    agent: CodingAgent,
    tokenizer: Any,
    answer: Callable[[str], str | Sequence[Step]],
    **server: Any,
) -> Iterator[tuple[Model, Recorder, str]]:
    core, recorder = Model(agent, tokenizer, answer), Recorder()
    with servers.scripted(core, tokenizer, CONTEXT, recorder.around, **server) as url:
        yield core, recorder, url


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    project = tmp_path / "project"
    project.mkdir()
    for name, text in FOUND.items():
        (project / name).write_text(f"{text}\n", encoding="utf-8")
    return project


def check(agent: CodingAgent, recorder: Recorder) -> None:
    """It asked where it should, with its key, for streams, and nothing was refused."""
    asked = [each for each in recorder.exchanges if each.path == agent.answers]
    assert asked
    assert all(each.status == 200 for each in asked), [each.status for each in asked]
    assert {each.key for each in asked} == {"none"}
    assert all(each.body["stream"] for each in asked)


@pytest.mark.parametrize("agent", of(AGENTS, "chat", "stream"))
def test_an_answer(agent: CodingAgent, tokenizer: Any, folder: Path) -> None:
    with (
        serving(agent, tokenizer, lambda _: TEXT) as (core, recorder, url),
        running(agent, QUESTION, url=url, folder=folder) as run,
    ):
        assert run.end() == 0, run.printed
        assert TEXT in run.printed
        check(agent, recorder)
        assert QUESTION in core.prompts[0]


@pytest.mark.parametrize("agent", of(AGENTS, "stream"))
def test_a_prompt_that_takes_long(agent: CodingAgent, tokenizer: Any, folder: Path) -> None:
    """What keeps a stream open while nothing is said: comments, and Anthropic's pings."""
    steps = [1.5, FILTERED, *pieces(TEXT[:7]), 1.5, *pieces(TEXT[7:])]
    with (
        serving(agent, tokenizer, lambda _: steps, keep_alive_s=0.2) as (_, recorder, url),
        running(agent, QUESTION, url=url, folder=folder) as run,
    ):
        assert run.end() == 0, run.printed
        assert TEXT in run.printed
        check(agent, recorder)


@pytest.mark.parametrize("agent", of(AGENTS, "chat"))
def test_a_second_question(agent: CodingAgent, tokenizer: Any, folder: Path) -> None:
    """Another run goes on with the conversation, which has the answer by then."""
    more = "And which one hangs beside the window?"
    with serving(agent, tokenizer, lambda _: TEXT) as (core, recorder, url):
        with running(agent, QUESTION, url=url, folder=folder) as run:
            assert run.end() == 0, run.printed
        core.prompts.clear()
        with running(agent, more, *agent.again, url=url, folder=folder) as run:
            assert run.end() == 0, run.printed
            assert TEXT in run.printed
        check(agent, recorder)
        assert any(
            all(text in prompt for text in (QUESTION, TEXT, more)) for prompt in core.prompts
        )


@pytest.mark.parametrize("agent", of(CALLING, "tools"))
def test_calls_and_their_results(agent: CodingAgent, tokenizer: Any, folder: Path) -> None:
    """One call, then two at once, and each result comes back."""

    def answer(prompt: str) -> str:
        hall, yard, loft = (text in prompt for text in FOUND.values())
        if yard and loft:
            return TEXT
        if not hall:
            return json.dumps(agent.call(folder / "hall.txt"))
        calls = [agent.call(folder / name) for name in ("yard.txt", "loft.txt")]
        return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)

    with (
        serving(agent, tokenizer, answer) as (core, recorder, url),
        running(agent, QUESTION, url=url, folder=folder) as run,
    ):
        assert run.end() == 0, run.printed
        assert TEXT in run.printed
        check(agent, recorder)
        assert len(core.prompts) >= 3
        assert all(text in core.prompts[2] for text in FOUND.values())


@pytest.mark.parametrize("agent", of(CALLING, "tools"))
def test_five_turns_with_text_beside_the_calls(
    agent: CodingAgent, tokenizer: Any, folder: Path
) -> None:
    """Every form in which models say something, call, and go on."""
    names = [f"room_{number}.txt" for number in range(len(FORMS))]
    contents = [f"The code of this room is {4100 + 7 * number}." for number in range(len(FORMS))]
    for name, text in zip(names, contents, strict=True):
        (folder / name).write_text(f"{text}\n", encoding="utf-8")

    def answer(prompt: str) -> str:
        turn = next((i for i, text in enumerate(contents) if text not in prompt), None)
        if turn is None:
            return TEXT
        call = agent.call(folder / names[turn])
        return FORMS[turn].replace("CALL", json.dumps(call))

    with (
        serving(agent, tokenizer, answer) as (core, recorder, url),
        running(agent, QUESTION, url=url, folder=folder) as run,
    ):
        status = run.end()
        read = [text for text in contents if any(text in prompt for prompt in core.prompts)]
        assert read == contents, f"{len(read)} of {len(contents)} turns\n{run.printed}"
        assert status == 0, run.printed
        assert TEXT in run.printed
        check(agent, recorder)
        assert len(core.prompts) == len(contents) + 1


def test_five_edits_with_text_around_them(tokenizer: Any, folder: Path) -> None:
    """Aider calls no tools: it edits by what the model writes, here with words around it."""
    agent = next(agent for agent in AGENTS if agent.name == "aider")
    file = folder / "count.py"
    file.write_text("count = 0\n", encoding="utf-8")

    def answer(prompt: str) -> str:
        number = prompt.count("Raise the count once more.") - 1
        return f"I raise it.\n\ncount.py\n```\ncount = {number + 1}\n```\n\nThat is all."

    with serving(agent, tokenizer, answer) as (_, recorder, url):
        for turn in range(5):
            again = agent.again if turn else ()
            flags = ("--edit-format", "whole", "--file", str(file), *again)
            text = "Raise the count once more."
            with running(agent, text, *flags, url=url, folder=folder) as run:
                assert run.end() == 0, run.printed
            assert file.read_text(encoding="utf-8") == f"count = {turn + 1}\n", run.printed
        check(agent, recorder)


@pytest.mark.parametrize("agent", of(AGENTS[:1], "tools"))
def test_agents_of_its_own(agent: CodingAgent, tokenizer: Any, folder: Path) -> None:
    """Claude Code has names for their models: the guide makes all of them the server's."""
    task = "Look for the brass key."
    names = ("haiku", "sonnet", "opus", "fable")

    def answer(prompt: str) -> str:
        if task in prompt:
            return TEXT
        task_of = {"description": "Keys", "prompt": task, "subagent_type": "Explore"}
        calls = [{"name": "Agent", "arguments": {**task_of, "model": name}} for name in names]
        return "\n".join(f"<tool_call>\n{json.dumps(call)}\n</tool_call>" for call in calls)

    with (
        serving(agent, tokenizer, answer, max_queue=16) as (core, recorder, url),
        running(agent, QUESTION, url=url, folder=folder) as run,
    ):
        assert run.end() == 0, run.printed
        check(agent, recorder)
        assert sum(QUESTION not in prompt for prompt in core.prompts) == len(names)


@pytest.mark.parametrize("agent", of(TYPED, "typed", "tools_and_schema"))
def test_a_typed_answer_after_a_call(agent: CodingAgent, tokenizer: Any, folder: Path) -> None:
    schema = folder / "schema.json"
    schema.write_text(json.dumps(SCHEMA), encoding="utf-8")
    typed = {"name": agent.typing, "arguments": json.loads(FORECAST)}

    def answer(prompt: str) -> str:
        if FOUND["hall.txt"] not in prompt:
            return json.dumps(agent.call(folder / "hall.txt"))
        return json.dumps(typed) if agent.typing else FORECAST

    assert agent.typed
    with (
        serving(agent, tokenizer, answer) as (core, recorder, url),
        running(agent, QUESTION, *agent.typed(schema), url=url, folder=folder) as run,
    ):
        assert run.end() == 0, run.printed
        assert '"degrees"' in run.printed
        check(agent, recorder)
        if not agent.typing:  # the server holds the answer to the schema
            grammar = core.requests[-1].grammar
            assert grammar is not None
            assert '"degrees"' in grammar.text


@pytest.mark.parametrize("agent", of(AGENTS, "errors"))
def test_a_wrong_model_is_shown(agent: CodingAgent, tokenizer: Any, folder: Path) -> None:
    with (
        serving(agent, tokenizer, lambda _: TEXT) as (_, recorder, url),
        running(agent, QUESTION, url=url, folder=folder, model="absent") as run,
    ):
        run.end()
        assert "absent" in run.printed
        assert TEXT not in run.printed
        asked = [each.status for each in recorder.exchanges if each.path == agent.answers]
        assert set(asked) == {404}
        assert len(asked) <= 6


@pytest.mark.parametrize("agent", of(SUMMARIZING, "errors"))
def test_a_prompt_that_is_too_long(agent: CodingAgent, tokenizer: Any, folder: Path) -> None:
    """By the words of the error it knows that it has to summarize the conversation."""

    def answer(prompt: str) -> str:
        return TEXT if FOUND["hall.txt"] in prompt else json.dumps(agent.call(folder / "hall.txt"))

    with (
        serving(agent, tokenizer, answer) as (core, recorder, url),
        running(agent, QUESTION, url=url, folder=folder) as run,
    ):
        core.refuse_next(FOUND["hall.txt"])
        run.end()
        assert TEXT in run.printed
        asked = [each.status for each in recorder.exchanges if each.path == agent.answers]
        assert asked.count(400) == 1
        assert asked[-1] == 200


@pytest.mark.parametrize("agent", of(AGENTS, "cancel"))
def test_an_agent_that_is_ended(agent: CodingAgent, tokenizer: Any, folder: Path) -> None:
    """The server drops the answer that nobody waits for."""
    begun = threading.Event()

    def answer(_: str) -> Sequence[Step]:
        begun.set()
        return [FILTERED, "Hé", "llo ", 60.0]

    with (
        serving(agent, tokenizer, answer) as (core, _, url),
        running(agent, QUESTION, url=url, folder=folder) as run,
    ):
        assert begun.wait(60), run.printed
        assert not core.cancelled.is_set()
        run.terminate()
        assert core.cancelled.wait(10), "the server went on after the agent had left"


@pytest.mark.parametrize("agent", of(FILTERING, "filter"))
def test_the_filter_of_the_guide(agent: CodingAgent, tokenizer: Any, folder: Path) -> None:
    with (
        serving(agent, tokenizer, lambda _: TEXT) as (core, recorder, url),
        running(agent, QUESTION, url=url, folder=folder, num_settings=2) as run,
    ):
        assert run.end() == 0, run.printed
        check(agent, recorder)
        assert {(each.filter.method, each.filter.keep) for each in core.requests} == {
            ("sieve", 512)
        }
