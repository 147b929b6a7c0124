"""Excel's XLSX: each sheet under a heading, each row a line with the header's names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta

from gemserve.files.formats.rows import Row, lines_of
from gemserve.files.formats.zip_parts import Parts, events

_WORKBOOK = "xl/workbook.xml"
_DATE_FORMATS = frozenset((*range(14, 23), *range(45, 48)))  # that every workbook has
_NO_DATE = re.compile(r'"[^"]*"|\[[^\]]*\]|\\.')  # parts of a format that are no letters of a date
_LAST_DAY = 2_958_465  # 9999-12-31
_COLUMN = re.compile(r"[A-Z]{1,3}")


@dataclass(frozen=True, slots=True)
class _Book:
    """`dates`: which styles show a number as a date. `epoch`: the day 0."""

    strings: list[str]
    dates: list[bool]
    epoch: datetime


def read(content: bytes) -> str:
    parts = Parts(content, "XLSX")
    targets = parts.targets(_WORKBOOK)
    by_kind = dict(targets.values())
    sheets, epoch = [], datetime(1899, 12, 30)
    for event, tag, attributes in events(parts.read(_WORKBOOK), _WORKBOOK):
        if event == "start" and tag == "workbookPr" and attributes.get("date1904") in ("1", "true"):
            epoch = datetime(1904, 1, 1)
        elif event == "start" and tag == "sheet" and attributes.get(":id") in targets:
            sheets.append((attributes.get("name", ""), targets[attributes[":id"]][1]))
    book = _Book(
        list(_strings(parts, by_kind.get("sharedStrings"))),
        list(_dates(parts, by_kind.get("styles"))),
        epoch,
    )
    return "\n\n".join(
        "\n".join([f"## {name}", "", *lines_of(_rows(parts, part, book))]) for name, part in sheets
    )


def _strings(parts: Parts, name: str | None) -> Iterator[str]:
    """The texts that cells refer to, without the reading aids of Japanese."""
    if name is None:
        return
    pieces: list[str] = []
    is_text, is_aid = False, False
    for event, tag, _ in events(parts.read(name), name):
        if event == "text" and is_text and not is_aid:
            pieces.append(tag)
        elif tag == "t":
            is_text = event == "start"
        elif tag == "rPh":
            is_aid = event == "start"
        elif event == "end" and tag == "si":
            yield "".join(pieces)
            pieces.clear()


def _dates(parts: Parts, name: str | None) -> Iterator[bool]:
    """Whether each style of cells shows dates."""
    if name is None:
        return
    own: dict[str, str] = {}
    is_within = False
    for event, tag, attributes in events(parts.read(name), name):
        if tag == "cellXfs":
            is_within = event == "start"
        elif event == "start" and tag == "numFmt":
            own[attributes.get("numFmtId", "")] = attributes.get("formatCode", "")
        elif event == "start" and tag == "xf" and is_within:
            number = attributes.get("numFmtId", "0")
            letters = _NO_DATE.sub("", own.get(number, "")).lower()
            yield number in map(str, _DATE_FORMATS) or any(map(letters.__contains__, "ydhs"))


def _rows(parts: Parts, name: str, book: _Book) -> Iterator[Row]:
    row: dict[int, str] = {}
    cell: dict[str, str] = {}
    pieces: list[str] = []
    is_value, column = False, 0
    for event, tag, attributes in events(parts.read(name), name):
        if event == "text":
            if is_value:
                pieces.append(tag)
        elif tag in ("v", "t"):
            is_value = event == "start"
        elif event == "start" and tag == "c":
            cell = dict(attributes)
            column = _column(cell.get("r", ""), column + 1)
        elif event == "end" and tag == "c":
            row[column] = _value("".join(pieces), cell, book)
            pieces.clear()
        elif event == "end" and tag == "row":
            if row:
                yield row
            row, column = {}, 0


def _column(reference: str, otherwise: int) -> int:
    letters = _COLUMN.match(reference)
    if letters is None:
        return otherwise
    number = 0
    for letter in letters[0]:
        number = number * 26 + ord(letter) - 64
    return number


def _value(text: str, cell: dict[str, str], book: _Book) -> str:
    """What a cell shows, more or less: dates as dates, and other numbers in full."""
    kind = cell.get("t", "n")
    if kind == "s":
        known = text.isascii() and text.isdecimal() and int(text[:9]) < len(book.strings)
        return book.strings[int(text[:9])] if known else ""
    if kind == "b":
        return {"0": "FALSE", "1": "TRUE"}.get(text, text)
    style = cell.get("s", "0")
    is_date = style.isascii() and style.isdecimal() and book.dates[int(style[:9]) :][:1] == [True]
    return _date(text, book.epoch) if kind == "n" and is_date else text


def _date(text: str, epoch: datetime) -> str:
    try:
        days = float(text)
    except ValueError:
        return text
    if not 0 <= days <= _LAST_DAY:
        return text
    moment = epoch + timedelta(seconds=round(days * 86_400))
    if days < 1:
        return moment.strftime("%H:%M:%S")
    return moment.strftime("%Y-%m-%d" if days == int(days) else "%Y-%m-%d %H:%M:%S")
