"""Writes `docs/models.md`: what was compared with transformers, and what is refused and why.

.venv/bin/python -m tests.architectures.page
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import logging as transformers_logging

from gemserve.errors import ModelError
from gemserve.model.families.reach import NOTHING
from tests.architectures import families
from tests.architectures.compare import Compared, compare

PAGE = Path(__file__).parents[2] / "docs" / "models.md"
_BEGIN, _END = "<!-- begin: {} -->", "<!-- end: {} -->"
_HEADS = {
    "served": "| types | sliding windows | states | filter | compiled step |\n"
    + "|---" * 5
    + "|\n",
    "refused": "| types | reason |\n|---|---|\n",
}


@dataclass(frozen=True, slots=True)
class Row:
    """A family's line, and the table that it is in."""

    family: str
    table: str
    line: str


def row_of(family: str) -> Row:
    """Compare a family. Raises `AssertionError` if it is served and wrong.

    One that transformers does not build needs other sizes in `families`.
    """
    try:
        compared = compare(family)
    except ModelError as error:
        return Row(family, "refused", f"| `{family}` | {_plain(_without_subject(str(error)))} |")
    assert compared.is_equal, (family, compared)
    filters = "any length" if compared.filter is not None else "up to the window"
    step = "yes" if compared.has_step else "no"
    cells = _windows(compared), _states(compared), filters, step
    return Row(family, "served", f"| `{family}` | {' | '.join(cells)} |")


def _windows(compared: Compared) -> str:
    kinds = set(compared.reaches) - {str(NOTHING)}
    if kinds == {"all tokens"}:
        return "no"
    kind = "chunks" if any("chunk" in reach for reach in kinds) else "windows"
    return f"{kind} in {'some' if 'all tokens' in kinds else 'all'} layers"


def _states(compared: Compared) -> str:
    if not compared.states:
        return "no"
    return "all layers" if compared.states == len(compared.reaches) else "some layers"


def _without_subject(reason: str) -> str:
    return reason.split(" cannot be served: ", 1)[-1]


def _plain(text: str) -> str:
    """The reason without what would break the table, and without the names of layers' classes."""
    text = re.sub(r"(?<=its layers) \([^)]*\)(?= are an encoder's)", "", text)
    return text.replace("|", "/").replace("<", "").replace(">", "")


def _joined(lines: Iterable[str]) -> list[str]:
    """One line for all families of which the same is said."""
    families: dict[str, list[str]] = {}
    for line in lines:
        family, said = line.strip("| ").split(" | ", 1)
        families.setdefault(said, []).append(family)
    return [f"| {', '.join(named)} | {said} |" for said, named in families.items()]


def lines_of(page: str, table: str) -> list[str]:
    """A line for each family of one of the page's tables."""
    begin, end = _BEGIN.format(table), _END.format(table)
    found = re.search(f"{re.escape(begin)}\n(.*?)\n{re.escape(end)}", page, re.DOTALL)
    assert found is not None, f"docs/models.md has no table {table}"
    cells = [line.strip("| ").split(" | ", 1) for line in found[1].splitlines()[2:]]
    return [f"| {family} | {said} |" for named, said in cells for family in named.split(", ")]


def with_rows(page: str, rows: Iterable[Row]) -> str:
    """The page with new tables."""
    rows = sorted(rows, key=lambda row: row.family)
    for table, head in _HEADS.items():
        begin, end = _BEGIN.format(table), _END.format(table)
        body = head + "\n".join(_joined(row.line for row in rows if row.table == table))
        before, rest = page.split(begin)
        page = f"{before}{begin}\n{body}\n{end}{rest.split(end)[1]}"
    return page


def main() -> None:
    transformers_logging.set_verbosity_error()
    rows = []
    for family in families.all_families():
        rows.append(row_of(family))
        print(rows[-1].line, flush=True)
    PAGE.write_text(with_rows(PAGE.read_text(), rows))
    counts = {table: sum(row.table == table for row in rows) for table in _HEADS}
    print(counts)


if __name__ == "__main__":
    main()
