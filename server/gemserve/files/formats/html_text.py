"""HTML as Markdown, so that headings are known."""

from __future__ import annotations

import re
import sys
from typing import Any

from gemserve.files.formats import Refused
from gemserve.files.plain_text import NotText, declared, decode

MOST_DEPTH = 20_000  # calls of Python: elements in one another take some of them each
_LEFT_OUT = ["script", "style", "template", "noscript", "svg", "nav"]
_MOST_ROWS, _MOST_COLUMNS = 65_534, 1000  # of a merged cell, as the HTML standard says
# as what the library reads elements that it would put into the line before
_READ_AS = {
    **dict.fromkeys(("summary", "details", "header", "footer", "main", "aside", "figure"), "div"),
    **dict.fromkeys(("form", "fieldset", "legend", "address", "hgroup", "center"), "div"),
    **dict.fromkeys(("dialog", "search", "optgroup"), "div"),
    **{"select": "ul", "datalist": "ul", "menu": "ul", "dir": "ul", "option": "li"},
}


def read(content: bytes) -> str:
    try:
        return markdown(decode(content, declared(content)))
    except NotText as error:
        raise Refused(str(error)) from None


def markdown(html: str) -> str:
    from bs4 import BeautifulSoup
    from markdownify import MarkdownConverter

    sys.setrecursionlimit(MOST_DEPTH)
    parsed = BeautifulSoup(html, "html.parser")
    for each in parsed(_LEFT_OUT):
        each.decompose()
    for each in parsed(list(_READ_AS)):
        each.name = _READ_AS[each.name]
    for each in parsed("table"):
        _fill_merged(parsed, each)
    converter = MarkdownConverter(heading_style="atx", strip=["a", "img"], bullets="-")
    text: str = converter.convert_soup(parsed.body or parsed)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in text.splitlines()))


def _fill_merged(page: Any, table: Any) -> None:
    """Put an empty cell wherever a cell reaches down from a row above."""
    below: dict[int, int] = {}  # rows to which cells still reach, by column
    for row in table("tr"):
        if row.find_parent("table") is not table:
            continue
        column = 0
        for cell in row(["td", "th"], recursive=False):
            column = _skip_merged(page, row, cell, below, column)
            rows = _span(cell, "rowspan", _MOST_ROWS)
            columns = _span(cell, "colspan", _MOST_COLUMNS)
            if rows > 1:
                below.update(dict.fromkeys(range(column, column + columns), rows - 1))
            column += columns
        _skip_merged(page, row, None, below, column)


def _skip_merged(page: Any, row: Any, cell: Any, below: dict[int, int], column: int) -> int:
    """The column of `cell`, or of the row's end, with an empty cell before it for each merged."""
    while below.get(column):
        empty = page.new_tag("td")
        if cell is None:
            row.append(empty)
        else:
            cell.insert_before(empty)
        below[column] -= 1
        column += 1
    return column


def _span(cell: Any, name: str, most: int) -> int:
    given = str(cell.get(name, ""))
    return max(1, min(int(given), most)) if given.isdecimal() and len(given) < 10 else 1
