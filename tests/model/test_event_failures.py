"""A report that cannot be made ends its request, and no other."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gemserve.contract.events import Event, Filtered, Finished
from gemserve.contract.requests import Request
from gemserve.engine import events
from gemserve.llm import LLM
from tests.model.test_progress import core_of, request
from tests.model.test_reader import WITH_READER
from tests.model.test_reader import request as read_first


def fail(*_: object, **__: object) -> Any:
    raise RuntimeError("no report")


@pytest.mark.parametrize("method", ["none", "sieve", "snapkv"])
@pytest.mark.parametrize("selects_only", [False, True])
def test_a_report_that_fails_ends_one_request(
    method: str, selects_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's thread ended, and with it all requests."""
    if method == "snapkv" and selects_only:
        pytest.skip("snapkv selects nothing that could be returned")
    core = core_of()
    asked = replace(request(method), selects_only=selects_only)
    monkeypatch.setattr(events, "_filtered", fail)
    assert ends(core, asked) == ["error"]
    assert core.kv_bytes_used == 0
    monkeypatch.undo()
    assert ends(core, asked) == ["length" if not selects_only else "stop"]
    core.check_integrity()


def test_a_reader_s_report_that_fails_ends_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice was answered all the same, without a report."""
    llm = LLM("builtin", WITH_READER)
    core, asked = llm.core, read_first(llm, "asked")

    def fail_once(*_: object, **__: object) -> Any:
        monkeypatch.undo()
        return fail()

    monkeypatch.setattr(events, "_filtered", fail_once)
    assert ends(core, asked) == ["error"]
    assert core.kv_bytes_used == 0
    assert ends(core, asked) == ["length"]
    core.check_integrity()


def ends(core: Any, asked: Request) -> list[str]:
    core.add(asked)
    found: list[Event] = []
    while not core.is_idle:
        found += [event for _, event in core.step()]
    assert sum(isinstance(event, Filtered) for event in found) <= 1
    return [event.reason for event in found if isinstance(event, Finished)]
