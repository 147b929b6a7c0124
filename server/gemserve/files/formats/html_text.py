"""HTML as Markdown, so that headings are known."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator, Set
from itertools import repeat
from typing import Any

from bs4 import BeautifulSoup, Tag
from bs4.element import Declaration, ProcessingInstruction

from gemserve.files.formats import Refused
from gemserve.files.plain_text import NotText, declared, decode

MOST_DEPTH = 20_000  # calls of Python: elements in one another take some of them each
_LEFT_OUT = ["script", "style", "template", "noscript", "svg", "nav"]
_MOST_ROWS, _MOST_COLUMNS = 65_534, 1000  # of a merged cell, as the HTML standard says
_MOST_FILLED = 100_000  # cells of a page: a few characters could ask for millions
# as what the library reads elements that it would put into the line before
_READ_AS = {
    **dict.fromkeys(("summary", "details", "header", "footer", "main", "aside", "figure"), "div"),
    **dict.fromkeys(("form", "fieldset", "legend", "address", "hgroup", "center"), "div"),
    **dict.fromkeys(("dialog", "search", "optgroup"), "div"),
    **{"select": "ul", "datalist": "ul", "menu": "ul", "dir": "ul", "option": "li"},
}
_BLOCK_NAMES = (
    "address article aside blockquote center details dialog dir div dl fieldset figcaption figure "
    "footer form h1 h2 h3 h4 h5 h6 header hgroup hr main menu nav ol p pre search section summary "
    "table ul"
)
_BLOCKS = frozenset(_BLOCK_NAMES.split())
_CELLS, _SECTIONS = {"td", "th", "caption"}, {"thead", "tbody", "tfoot"}
# which elements without an end tag each element ends, and within which they stand
_ENDED_BY: dict[str, tuple[Set[str], Set[str]]] = {
    **dict.fromkeys(_BLOCKS, ({"p"}, _BLOCKS | _CELLS | {"li", "dt", "dd"})),
    **dict.fromkeys(("dt", "dd"), ({"dt", "dd"}, {"dl"})),
    **dict.fromkeys(("td", "th"), (_CELLS, {"table"})),
    **dict.fromkeys(_SECTIONS, (_CELLS | {"tr"} | _SECTIONS, {"table"})),
    "li": ({"li"}, {"ul", "ol", "menu", "dir"}),
    "option": ({"option"}, {"select", "datalist"}),
    "tr": (_CELLS | {"tr"}, {"table"}),
}


class _Page(BeautifulSoup):
    """A page whose end tags may be left out, as HTML allows."""

    def handle_starttag(self, name: str, *given: Any, **named: Any) -> Tag | None:
        if name in _ENDED_BY:
            self.endData()
            for _ in range(len(self.tagStack) - self._num_kept(*_ENDED_BY[name])):
                self.popTag()
        return super().handle_starttag(name, *given, **named)

    def _num_kept(self, ended: Set[str], within: Set[str]) -> int:
        """How many of the open elements stay open when one begins that ends these."""
        kept = len(self.tagStack)
        for depth in range(kept - 1, 0, -1):
            tag = self.tagStack[depth].name
            if tag in ended:
                kept = depth
            elif tag in within:
                break
        return kept


def read(content: bytes) -> str:
    try:
        return markdown(decode(content, declared(content)))
    except NotText as error:
        raise Refused(str(error)) from None


def markdown(html: str) -> str:
    from markdownify import MarkdownConverter

    sys.setrecursionlimit(MOST_DEPTH)
    parsed = _Page(html, "html.parser")
    for each in parsed(_LEFT_OUT):
        each.decompose()
    for each in list(parsed.descendants):
        if isinstance(each, Declaration | ProcessingInstruction):  # as of `<?xml version="1.0"?>`
            each.extract()
    if parsed.body:
        for each in parsed("title"):
            if not each.body:  # whatever follows a title without an end tag is within it
                each.decompose()
    for each in parsed(list(_READ_AS)):
        each.name = _READ_AS[each.name]
    empty_cells = repeat(lambda: parsed.new_tag("td"), _MOST_FILLED)
    for each in parsed("table"):
        _fill_merged(empty_cells, each)
        _join_sections(each)
    converter = MarkdownConverter(heading_style="atx", strip=["a", "img"], bullets="-")
    # a page may have several bodies, or text behind them
    text: str = converter.convert_soup(parsed)
    return re.sub(r"\n{3,}", "\n\n", "\n".join(line.rstrip() for line in text.splitlines()))


def _rows(table: Any) -> list[Any]:
    return [row for row in table("tr") if row.find_parent("table") is table]


def _join_sections(table: Any) -> None:
    """Put all rows but those of the head together: the library begins a table with each section."""
    body = None
    for row in _rows(table):
        if row.parent.name != "thead":
            body = body or row.parent
            if row.parent is not body:
                body.append(row)


def _fill_merged(empty_cells: Iterator[Callable[[], Any]], table: Any) -> None:
    """Put an empty cell wherever a cell reaches down from a row above, while there are any."""
    reach: dict[int, int] = {}  # the row to which the cell of each column reaches
    section = None
    for number, row in enumerate(_rows(table)):
        if row.parent is not section:
            section = row.parent
            reach.clear()
        column = 0
        for cell in [*row(["td", "th"], recursive=False), None]:
            while reach.get(column, 0) > number and (new := next(empty_cells, None)):
                empty = new()
                row.append(empty) if cell is None else cell.insert_before(empty)
                column += 1
            if cell is not None:
                columns = range(column, column + _span(cell, "colspan", _MOST_COLUMNS))
                watched = columns[: max(0, _MOST_COLUMNS - column)]
                reach.update(dict.fromkeys(watched, number + _span(cell, "rowspan", _MOST_ROWS)))
                column = columns.stop


def _span(cell: Any, name: str, most: int) -> int:
    """How many rows or columns a cell takes; of rows 0 means all that follow."""
    given = str(cell.get(name, ""))
    if not given.isdecimal() or len(given) > 9:
        return 1
    return min(int(given) or (most if name == "rowspan" else 1), most)
