"""Writes the table of docs/clients.md, client by capability, from a run of the tests."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
BEGIN, END = "<!-- table of capabilities: begin -->", "<!-- table of capabilities: end -->"
CAPABILITIES = {
    "chat": "chat",
    "stream": "stream",
    "typed": "typed answer",
    "forced_call": "forced call",
    "tools": "tools",
    "tools_and_schema": "tools and schema",
    "errors": "typed errors",
    "cancel": "cancellation",
    "filter": "filter",
}
SIGNS = {"passed": "yes", "failed": "**no**", "skipped": "not run"}


class CapabilityTable:
    """A plugin: collects the outcomes of tests marked `capability(client, name, ...)`."""

    def __init__(self) -> None:
        self._marks: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._outcomes: dict[tuple[str, str], list[str]] = defaultdict(list)
        self._faults: dict[str, str] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for mark in item.iter_markers("capability"):
                client, *names = mark.args
                self._marks[item.nodeid] = (client, tuple(names))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid not in self._marks or (report.when != "call" and report.passed):
            return
        client, names = self._marks[report.nodeid]
        reason = getattr(report, "wasxfail", None)
        for name in names:
            if reason is not None and report.skipped:
                self._faults[reason] = self._faults.get(reason, str(len(self._faults) + 1))
                self._outcomes[client, name].append(f"no ({self._faults[reason]})")
            else:
                self._outcomes[client, name].append(SIGNS[report.outcome])

    def pytest_sessionfinish(self) -> None:
        page = PAGE.read_text(encoding="utf-8")
        assert BEGIN in page, f"{PAGE.name} has no {BEGIN}"
        pattern = f"(?<={re.escape(BEGIN)}\n).*?(?={re.escape(END)})"
        new = re.sub(pattern, lambda _: self._table(), page, flags=re.DOTALL)
        PAGE.write_text(new, encoding="utf-8")

    def _table(self) -> str:
        titles = ["client", *CAPABILITIES.values()]
        rows = [titles, ["---"] * len(titles)]
        for client in sorted({client for client, _ in self._outcomes}, key=str.casefold):
            rows.append([client, *(self._cell(client, name) for name in CAPABILITIES)])
        lines = ["| " + " | ".join(row) + " |" for row in rows]
        notes = [f"{number}. {reason}" for reason, number in self._faults.items()]
        return "\n".join([*lines, *([""] if notes else []), *notes, ""])

    def _cell(self, client: str, name: str) -> str:
        """The worst outcome; a client that cannot even be asked for something has none."""
        outcomes = set(self._outcomes.get((client, name), ()))
        for worst in (SIGNS["failed"], SIGNS["skipped"]):
            if worst in outcomes:
                return worst
        partly = sorted(outcomes - {SIGNS["passed"]})
        if partly and SIGNS["passed"] in outcomes:
            return f"partly, {', '.join(partly).replace('no ', 'see ')}"
        return partly[0] if partly else SIGNS["passed"] if outcomes else "–"
