"""Faults at every seam: one error for one request, right answers for all others, nothing left.

The server is real, with a tiny model. `docs/limits.md` has the matrix and explains its words.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import httpx
import pytest

from gemserve.engine.reuse import disk, disk_threads
from tests.e2e.fault_plan import FaultPlan
from tests.e2e.fault_seams import CLIENT_SOCKET, NOTES_PASS, NOTES_TASK, SEAMS
from tests.e2e.fault_world import (
    LEFT,
    OTHERS,
    REAL_MODEL,
    VICTIM,
    Json,
    Outcome,
    World,
    ask,
    ask_by_socket,
    world,
)
from tests.fakes import COMPLETIONS, wait_for

ERROR, ANSWER = "error", "answered"
# seam: fault: how the victim ends
MATRIX: dict[str, dict[str, str]] = {
    "tokenizer": {"exception": ERROR, "memory": ERROR, "delay": ANSWER},
    "admission": {"exception": ERROR, "memory": ERROR, "delay": ANSWER},
    "filter chunk": {
        "exception": ERROR,
        "memory": ERROR,
        "device memory": ERROR,
        "nan": ERROR,
        "delay": ANSWER,
    },
    "selection": {"exception": ERROR, "memory": ERROR, "device memory": ERROR, "delay": ANSWER},
    "prefill chunk": {
        "exception": ERROR,
        "memory": ERROR,
        "device memory": ERROR,
        "nan": ERROR,
        "delay": ANSWER,
    },
    "decode step": {
        "exception": ERROR,
        "memory": ERROR,
        "device memory": ERROR,
        "nan": ERROR,
        "delay": ANSWER,
    },
    "sampler": {"exception": ERROR, "memory": ERROR, "device memory": ERROR, "delay": ANSWER},
    "grammar": {"exception": ERROR, "memory": ERROR, "delay": ANSWER},
    "detokenizer": {"exception": ERROR, "memory": ERROR, "delay": ANSWER},
    "reply": {"exception": ERROR, "memory": ERROR, "delay": ANSWER},
    "adapter load": {"exception": ERROR, "memory": ERROR, "disk full": ERROR, "delay": ANSWER},
    "adapter file": {"disk full": ERROR, "nan": ERROR},
    "cache copy": {"exception": ERROR, "memory": ERROR, "device memory": ERROR, "delay": ANSWER},
    "cache write": {"exception": ANSWER, "memory": ANSWER, "disk full": ANSWER, "delay": ANSWER},
    "cache publish": {"exception": ANSWER, "disk full": ANSWER, "delay": ANSWER},
    "cache take": {"memory": ANSWER, "device memory": ANSWER, "delay": ANSWER},
    "cache read": {"exception": ANSWER, "memory": ANSWER, "disk full": ANSWER, "delay": ANSWER},
    "cache put": {"memory": ANSWER, "device memory": ANSWER, "delay": ANSWER},
    "offload copy": {"exception": ERROR, "memory": ERROR, "device memory": ERROR, "delay": ANSWER},
}
CELLS = [(seam, fault) for seam, faults in MATRIX.items() for fault in faults]
SCHEMA = {"type": "object", "properties": {"color": {"enum": ["red", "green"]}}}
# what the victim sends besides
FIELDS: dict[str, Json] = {
    "grammar": {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "color", "schema": {**SCHEMA, "required": ["color"]}},
        },
        "max_tokens": 40,
    },
    "adapter load": {"adapter": "lent"},
    # what a filter pass takes over is shared, and not copied
    "cache copy": {"filter": {"method": "none"}},
}
FIELDS["adapter file"] = FIELDS["adapter load"]
IN_MEMORY, ON_DISK = {"cache copy"}, {"cache read", "cache put"}


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Iterator[World]:
    with pytest.MonkeyPatch.context() as patch, ExitStack() as stack:
        patch.setattr(disk, "_OVERHEAD_S", -1e9)  # loading from disk always pays
        yield stack.enter_context(world(tmp_path_factory.mktemp("faults"), tokenizer))


def client_of(served: World) -> httpx.AsyncClient:
    # without certificates, which take longer to load than a request takes
    return httpx.AsyncClient(base_url=served.url, timeout=120, verify=False)


async def alone(served: World, path: str, body: Json) -> Outcome:
    async with client_of(served) as client:
        return await ask(client, path, body)


@pytest.fixture(scope="module")
def recorded(served: World) -> dict[str, Outcome]:
    """The answers without a fault."""
    answers = {}
    for name, (path, body) in {
        **{str(i): other for i, other in enumerate(OTHERS)},
        **{seam: (COMPLETIONS, victim_of(served, seam)) for seam in ("", *FIELDS)},
    }.items():
        answers[name] = asyncio.run(alone(served, path, body))
        assert answers[name].kind == ANSWER, answers[name]
    return answers


def victim_of(served: World, seam: str) -> Json:
    if "adapter" in FIELDS.get(seam, {}):
        store = served.serving.adapters
        store.load("lent", "good")
        store._entries["lent"].kept = None  # as if another had taken its room
    return {**VICTIM, **FIELDS.get(seam, {})}


def prepare(served: World, seam: str) -> None:
    """What the seam's calls need to happen: a document in the cache, or one on the disk."""
    served.empty_caches()
    if seam in IN_MEMORY | ON_DISK:
        body = victim_of(served, seam)
        assert asyncio.run(alone(served, COMPLETIONS, body)).kind == ANSWER
        served.settle()
    if seam in ON_DISK:
        served.empty_memory()


async def strike(
    served: World, plan: FaultPlan, body: Json, others: list[Outcome], how: str = ""
) -> Outcome:
    """The victim's outcome. It runs beside others, whose outcomes are put into `others`.

    `how`: what its client does, if it is not an ordinary one.
    """
    async with client_of(served) as client:
        begun = asyncio.Event()
        tasks = [asyncio.create_task(ask(client, *other, begun=begun)) for other in OTHERS]
        await begun.wait()
        plan.is_armed = True
        if how:
            outcome = await asyncio.to_thread(ask_by_socket, served.port, body, how)
        else:
            outcome = await ask(client, COMPLETIONS, body)
        others += await asyncio.gather(*tasks)
    served.settle()  # documents are written after the answer
    plan.is_armed = False
    return outcome


def test_a_disk_that_hangs_costs_a_prompt_only_time(
    served: World, recorded: dict[str, Outcome], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt whose file was being read waited for ever."""
    prepare(served, "cache read")
    cache, gate, read = served.core._disk, threading.Event(), disk_threads.read_block
    assert cache is not None

    def hang(*arguments: Any) -> bytearray:
        gate.wait(60)
        return read(*arguments)

    monkeypatch.setattr(disk_threads, "read_block", hang)
    monkeypatch.setattr(disk, "_STALL_S", 0.2)
    speed = cache._bytes_per_s
    try:
        assert asyncio.run(alone(served, COMPLETIONS, VICTIM)) == recorded[""]
        assert not gate.is_set()
        assert cache._bytes_per_s == 0  # everything is computed
        monkeypatch.setattr(disk, "_FORGET_S", 0.0)
        assert asyncio.run(alone(served, COMPLETIONS, VICTIM)) == recorded[""]
        assert cache._bytes_per_s == 0  # as long as the reading hangs
    finally:
        gate.set()
    wait_for(lambda: not cache._threads.is_reading, 20)
    prepare(served, "cache read")
    assert asyncio.run(alone(served, COMPLETIONS, VICTIM)) == recorded[""]
    assert cache._bytes_per_s == pytest.approx(speed, rel=0.99)
    served.assert_nothing_is_held()


@pytest.mark.parametrize("fault", ["exception", "reset", "delay"])
def test_a_client_that_fails_takes_nobody_with_it(
    served: World, recorded: dict[str, Outcome], fault: str
) -> None:
    """The seam "client socket": sending to it fails, it resets its connection, or it is slow."""
    served.empty_caches()
    plan = FaultPlan("exception", served.victim_token, limit=int(fault == "exception"))
    others: list[Outcome] = []
    body = {**VICTIM, "max_tokens": 8 if fault == "delay" else 1000}
    with CLIENT_SOCKET.replaced(plan):
        outcome = asyncio.run(strike(served, plan, body, others, how=fault))
    assert outcome == (recorded[""] if fault == "delay" else LEFT)
    assert others == [recorded["0"], recorded["1"]]
    served.assert_nothing_is_held()
    assert asyncio.run(alone(served, COMPLETIONS, VICTIM)) == recorded[""]


@pytest.mark.parametrize(("seam", "fault"), CELLS)
def test_a_fault_ends_one_request_at_most(
    served: World, recorded: dict[str, Outcome], seam: str, fault: str
) -> None:
    if REAL_MODEL is not None and seam == "offload copy":
        pytest.skip("only the tiny model has layers that rest on the host")
    prepare(served, seam)
    body, expected = victim_of(served, seam), recorded[seam if seam in FIELDS else ""]
    plan = FaultPlan(fault, served.victim_token, limit=SEAMS[seam].limit)
    others: list[Outcome] = []
    notes = replace(plan, fault="none", is_armed=True)
    with SEAMS[seam].replaced(plan), NOTES_PASS.replaced(notes), NOTES_TASK.replaced(notes):
        outcome = asyncio.run(strike(served, plan, body, others))
    assert plan.num_struck, "the fault has not struck"
    assert outcome.kind == MATRIX[seam][fault], outcome
    if outcome.kind == ANSWER:
        assert outcome == expected
    else:
        assert outcome.error
    assert others == [recorded["0"], recorded["1"]]
    served.assert_nothing_is_held()
    again = asyncio.run(alone(served, COMPLETIONS, victim_of(served, seam)))
    assert again == expected
    assert served.serving.engine.death is None
