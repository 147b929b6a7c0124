"""How `benchmarks/robustness/cut_off_host.py` reads the end of a stream, and what it needs."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from benchmarks.robustness.cut_off_host import FLEET, Outcome, phase, read_stream
from benchmarks.robustness.two_hosts import NotPossible, two_hosts


def token(text: str, reason: str | None = None) -> str:
    return json.dumps({"choices": [{"text": text, "finish_reason": reason}]})


LOST = json.dumps({"error": {"code": "replica_lost", "message": "lost"}})


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([token("a"), token("b", "length"), "[DONE]"], ("ab", "whole")),
        ([token("a"), LOST, "[DONE]"], ("a", "replica_lost")),
        ([token("a"), token("b", "length")], ("", "no end")),
        ([token("a"), "[DONE]"], ("", "no end")),
        ([token("a", "length"), LOST, "[DONE]"], ("", "no end")),
        ([token("a", "length"), "[DONE]", "[DONE]"], ("", "no end")),
        ([], ("", "no end")),
    ],
)
def test_a_stream_has_one_terminal_event(events: list[str], expected: tuple[str, str]) -> None:
    assert read_stream(events) == expected


def test_requests_are_told_apart_by_when_they_ran() -> None:
    def ran(began_s: float, ended_s: float) -> str:
        return phase(Outcome(began_s, ended_s, 0.0, "whole", True), cut_s=10, restored_s=40)[:1]

    assert [ran(0, 9), ran(9, 11), ran(11, 60), ran(41, 42)] == ["1", "2", "3", "4"]


def test_its_configuration_is_one_that_ray_app_takes() -> None:
    pytest.importorskip("ray", reason="needs the packages of gemserve[ray]")
    from gemserve_fleet.ray_app import build

    (application,) = FLEET["applications"]
    arguments: dict[str, Any] = application["args"]
    assert build(arguments)._bound_deployment.name == "ingress"


def test_without_root_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(NotPossible, match="root"), two_hosts():
        pass
