"""docs/limits.md names tests and guards: each must exist, and each "yes" must be repeatable."""

from __future__ import annotations

import re

import pytest

from tests.hardening.remove_guards import REMOVALS, ROOT, Removal, path_of

PAGE = (ROOT / "docs/limits.md").read_text("utf-8")
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in PAGE.split("\n")
    if line.startswith("| ") and "::" in line
]


def named_tests(cell: str) -> list[str]:
    names = re.findall(r"`([\w/.]+::\w+)`", cell)
    return [name if "/" in name else f"tests/hardening/{name}" for name in names]


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
    for name in named_tests(tests):
        path, _, function = name.partition("::")
        assert re.search(rf"^(async )?def {function}\(", (ROOT / path).read_text("utf-8"), re.M)
    assert guards_in(guards)
    for file, names in guards_in(guards):
        source = path_of(f"{file}.py").read_text("utf-8")
        assert all(re.search(rf"\b{name}\b", source) for name in names), (file, names)
    removed = {removal.test for removal in REMOVALS}
    assert outcome == ("yes" if removed & set(named_tests(tests)) else "not tried")


@pytest.mark.parametrize("removal", REMOVALS, ids=lambda removal: removal.test.split("::")[1])
def test_a_guard_stands_where_it_is_taken_out(removal: Removal) -> None:
    """Otherwise the script would take out nothing, and the table would claim too much."""
    source = path_of(removal.file).read_text("utf-8")
    assert source.count(removal.text) == 1
    assert any(removal.test in named_tests(row[-3]) for row in ROWS)
