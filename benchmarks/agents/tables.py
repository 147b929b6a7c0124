"""Prints the tables of one measurement: several of them, before the result line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gemserve_client.load_test.text_table import aligned, cell


def print_table(rows: Sequence[Mapping[str, Any]], hidden: Sequence[str] = ()) -> None:
    """Print all columns but the hidden ones, and an empty line. A row may lack columns."""
    if rows:
        columns = [c for c in dict.fromkeys(k for row in rows for k in row) if c not in hidden]
        print(aligned([columns, *([cell(row.get(c)) for c in columns] for row in rows)]))
        print()
