"""Writes the table of docs/clients.md, client by capability, from a run of the tests.

Only the rows of clients that were run are replaced: run all tests of a client together.
"""

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
YES, NO, SKIPPED, FAULT, NONE = "yes", "**no**", "not run", "no, see below", "–"
FROM_OUTCOME = {"passed": YES, "failed": NO, "skipped": SKIPPED}


class CapabilityTable:
    """A plugin: collects the outcomes of tests marked `capability(client, name, ...)`."""

    def __init__(self) -> None:
        self._marks: dict[str, tuple[str, tuple[str, ...]]] = {}
        self._outcomes: dict[tuple[str, str], set[str]] = defaultdict(set)
        self._notes: set[str] = set()

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            for mark in item.iter_markers("capability"):
                client, *names = mark.args
                self._marks[item.nodeid] = (client, tuple(names))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.nodeid not in self._marks or (report.when != "call" and report.passed):
            return
        client, names = self._marks[report.nodeid]
        fault = getattr(report, "wasxfail", None) if report.skipped else None
        for name in names:
            self._outcomes[client, name].add(FAULT if fault else FROM_OUTCOME[report.outcome])
            if fault:
                self._notes.add(f"- {client}, {CAPABILITIES[name]}: {fault}")

    def pytest_sessionfinish(self) -> None:
        page = PAGE.read_text(encoding="utf-8")
        before, rest = page.split(f"{BEGIN}\n")
        old, after = rest.split(END)
        PAGE.write_text(f"{before}{BEGIN}\n{self._table(old)}{END}{after}", encoding="utf-8")

    def _table(self, old: str) -> str:
        titles = ["client", *CAPABILITIES.values()]
        clients = {client for client, _ in self._outcomes}
        rows = {row.split(" | ")[0][2:]: row for row in re.findall(r"^\| .*\|$", old, re.M)[2:]}
        rows |= {client: self._row(client) for client in clients}
        notes = set(re.findall(r"^- .*$", old, re.M))
        notes = {note for note in notes if not any(note.startswith(f"- {c}, ") for c in clients)}
        lines = ["| " + " | ".join(row) + " |" for row in (titles, ["---"] * len(titles))]
        lines += [rows[client] for client in sorted(rows, key=str.casefold)]
        told = sorted(notes | self._notes)
        return "\n".join([*lines, *([""] if told else []), *told, ""])

    def _row(self, client: str) -> str:
        cells = [self._cell(self._outcomes.get((client, name), set())) for name in CAPABILITIES]
        return "| " + " | ".join([client, *cells]) + " |"

    def _cell(self, outcomes: set[str]) -> str:
        """The worst outcome; a client that has nothing of the kind has none."""
        if outcomes == {FAULT, YES}:
            return "partly, see below"
        return next((each for each in (NO, SKIPPED, FAULT, YES) if each in outcomes), NONE)
