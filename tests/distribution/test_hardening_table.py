"""docs/limits.md names tests and guards, and the script takes guards out: each must exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.hardening.remove_guards import GUARDS, ROOT, Guard

PAGE = (ROOT / "docs/limits.md").read_text("utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.split("\n")
    if line.startswith("| ") and "::" in line
]


def named_tests(cell: str) -> list[str]:
    names = re.findall(r"`([\w/.]+::\w+)`", cell)
    return [name if "/" in name else f"tests/hardening/{name}" for name in names]


def path_of(file: str) -> Path:
    package, *_ = file.split("/")
    folders = {"gemserve_kernels": "kernels", "gemserve_fleet": "server"}
    return ROOT / folders.get(package, "server/gemserve") / f"{file}.py"


def is_defined(name: str) -> bool:
    """Whether there is a test "FILE::FUNCTION"."""
    path, _, function = name.partition("::")
    source = (ROOT / path).read_text("utf-8")
    return re.search(rf"^(async )?def {function}\(", source, re.M) is not None


def guards_in(cell: str) -> list[tuple[str, list[str]]]:
    """Files of the package, each with the names that it must define."""
    parts = [part for part in cell.split("; ") if part]
    found = []
    for part in parts:
        file, *names = re.findall(r"`([\w/]+)`", part)
        found.append((file, names))
    return found


def test_the_table_is_complete() -> None:
    numbers = [row[0] for row in ROWS if row[0].isdigit()]
    assert numbers == [*map(str, range(1, 29)), *map(str, range(1, 11))]
    assert len(ROWS) > 44


@pytest.mark.parametrize("row", ROWS, ids=lambda row: re.sub(r"\W+", " ", row[-5])[:40])
def test_a_row_names_what_is_there(row: list[str]) -> None:
    *_, tests, guards, outcome = row
    assert named_tests(tests)
    assert all(map(is_defined, named_tests(tests)))
    assert guards_in(guards)
    for file, names in guards_in(guards):
        source = path_of(file).read_text("utf-8")
        assert all(re.search(rf"\b{name}\b", source) for name in names), (file, names)
    assert outcome in ("yes", "not tried")


@pytest.mark.parametrize("guard", GUARDS, ids=lambda guard: guard.test.split("::")[1])
def test_a_guard_stands_where_it_is_taken_out(guard: Guard) -> None:
    """Otherwise the script would take out nothing."""
    source = (ROOT / "server/gemserve" / guard.file).read_text("utf-8")
    assert source.count(guard.text) == 1
    assert is_defined(guard.test)
    outcomes = [row[-1] for row in ROWS if guard.test in named_tests(row[-3])]
    assert "not tried" not in outcomes
