"""Slow schemas hold up other new schemas, for a while, and nothing else."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from gemserve.api.requests.request_builder import RequestBuilder
from gemserve.api.requests.schema_trials import MAX_TRIALS, MAX_TRIALS_OF_A_KEY
from gemserve.contract.sampling import Grammar
from gemserve.decoding.grammar import Grammars
from gemserve.errors import SchemasBusy
from tests.fakes import CHAT, COMPLETIONS, FakeCore, api_over, wait_for_async

pytestmark = pytest.mark.anyio


def wanting(number: int) -> dict[str, Any]:
    schema = {"const": number}
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


@pytest.fixture
def trials(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Trials that end when the event is set."""
    gate = threading.Event()

    def check(*_: object) -> None:
        assert gate.wait(30)

    monkeypatch.setattr("gemserve.decoding.grammar.check", check)
    yield gate
    gate.set()


async def test_slow_schemas_hold_no_thread_that_others_need(
    tokenizer: Any, trials: threading.Event
) -> None:
    """120 of them held all 40 threads: `max_tokens: 1` took 75 s while /health looked fine."""
    async with api_over(FakeCore(), tokenizer, max_queue=200) as api:
        slow = [asyncio.create_task(api.post(CHAT, response_format=wanting(i))) for i in range(120)]
        await wait_for_async(lambda: sum(t.done() for t in slow) == 120 - MAX_TRIALS, 20)
        async with asyncio.timeout(10):
            assert (await api.post(COMPLETIONS, max_tokens=1)).status_code == 200
            assert (await api.client.get("/tokenizer_info")).status_code == 200
        refused = next(t for t in slow if t.done()).result()
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "schema_trials_busy"
        assert int(refused.headers["retry-after"]) >= 1
        trials.set()
        statuses = [reply.status_code for reply in await asyncio.gather(*slow)]
        assert (statuses.count(200), statuses.count(503)) == (MAX_TRIALS, 120 - MAX_TRIALS)
        assert (await api.post(CHAT, response_format=wanting(500))).status_code == 200


async def test_more_strict_tools_than_are_remembered_of_schemas_once(
    tokenizer: Any, trials: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From 64 on each drove out the next one that was needed, and the answer was a 503 after 200
    trials. The prompt was tokenized before each."""
    trials.set()
    built: list[str] = []
    build = RequestBuilder._chat_prompt

    def counted(builder: RequestBuilder, messages: Any, field: str, _: Any, *rest: Any) -> Any:
        built.append("prompt")
        return build(builder, messages, field, (), *rest)  # so many tools would be too long

    monkeypatch.setattr(RequestBuilder, "_chat_prompt", counted)
    parameters = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = [
        {
            "type": "function",
            "function": {"name": f"f{i}", "parameters": parameters, "strict": i < 69},
        }
        for i in range(70)
    ]
    async with api_over(FakeCore(), tokenizer) as api:
        reply = await api.post(CHAT, tools=tools, tool_choice="required")
        assert reply.status_code == 200, reply.text
    assert len(built) == 1


async def test_one_key_s_schemas_leave_room_for_another_s(
    tokenizer: Any, trials: threading.Event, tmp_path: Path
) -> None:
    (tmp_path / "keys").write_text("alice\nbob\n")
    settings = {"api_key_file": str(tmp_path / "keys"), "max_queue": 200}
    async with api_over(FakeCore(), tokenizer, **settings) as api:

        def post(key: str, number: int) -> asyncio.Task[Any]:
            headers = {"Authorization": f"Bearer {key}"}
            wanted = wanting(number)
            return asyncio.create_task(api.post(CHAT, response_format=wanted, headers=headers))

        alice = [post("alice", number) for number in range(30)]
        await wait_for_async(lambda: sum(t.done() for t in alice) == 30 - MAX_TRIALS_OF_A_KEY, 20)
        bob = post("bob", 99)
        await asyncio.sleep(0.1)
        assert not bob.done()
        trials.set()
        assert (await bob).status_code == 200
        await asyncio.gather(*alice)


async def test_requests_that_are_being_parsed_count_as_load(
    tokenizer: Any, trials: threading.Event
) -> None:
    async with api_over(FakeCore(), tokenizer, max_queue=3) as api:
        slow = [asyncio.create_task(api.post(CHAT, response_format=wanting(i))) for i in range(9)]
        await wait_for_async(lambda: sum(t.done() for t in slow) == 6)
        assert {t.result().status_code for t in slow if t.done()} == {503}
        trials.set()
        assert sorted(r.status_code for r in await asyncio.gather(*slow)) == [200] * 3 + [503] * 6


async def test_a_busy_machine_is_no_fault_of_the_schema(
    tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trial that found no processor was remembered as a schema that takes too long."""
    busy = True

    def check(*_: object) -> None:
        if busy:
            raise SchemasBusy("the machine was too busy")

    monkeypatch.setattr("gemserve.decoding.grammar.check", check)
    async with api_over(FakeCore(), tokenizer) as api:
        assert (await api.post(CHAT, response_format=wanting(1))).status_code == 503
        busy = False
        assert (await api.post(CHAT, response_format=wanting(1))).status_code == 200


def test_the_worker_tries_nothing_again(tokenizer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A schema that 64 others had driven out of the cache was tried anew, and ended in a 500."""
    grammars = Grammars(tokenizer, vocab_size=len(tokenizer.get_vocab()), end_ids=(2,))
    monkeypatch.setattr("gemserve.decoding.grammar.check", lambda *_: None)
    given = Grammar('{"const": 0}')
    grammars.try_out(given)
    known = grammars.known(given)
    for number in range(1, 70):
        grammars.try_out(Grammar(f'{{"const": {number}}}'))

    def never(*_: object) -> None:
        raise AssertionError("tried again")

    monkeypatch.setattr("gemserve.decoding.grammar.check", never)
    assert grammars.matcher(known).allowed().any()
