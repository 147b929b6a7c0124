"""Rows of a table as lines, each with the names from the header."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

_NAME_CHARS = 80  # of a header's cell, which stands in every line

Row = Mapping[int, str]  # the cells that are not empty, by column


def lines_of(rows: Iterable[Row]) -> Iterator[str]:
    """The header as it is, and each row behind it as "name: cell; name: cell".

    The first row with cells is a header if it has two cells or more, which all differ, and none is
    a number. Without a header a row is its cells.
    """
    header: dict[int, str] | None = None
    for row in rows:
        cells = {column: " ".join(cell.split()) for column, cell in row.items()}
        cells = {column: cell for column, cell in cells.items() if cell}
        if header is None and not cells:
            continue  # a blank line in front of a table is no header
        if header is None:
            header = _names(cells)
            yield "; ".join(cells.values())
        else:
            yield "; ".join(
                f"{header[column]}: {cell}" if column in header else cell
                for column, cell in cells.items()
            )


def _names(cells: Mapping[int, str]) -> dict[int, str]:
    is_header = 1 < len(cells) == len(set(cells.values())) and not any(
        map(_is_number, cells.values())
    )
    return {column: cell[:_NAME_CHARS] for column, cell in cells.items()} if is_header else {}


def _is_number(cell: str) -> bool:
    try:
        float(cell.replace(",", ".").strip("%$€£ "))
    except ValueError:
        return False
    return True
