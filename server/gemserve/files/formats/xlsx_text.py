"""Excel's XLSX: each sheet under a heading, each row a line with the header's names."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from decimal import Decimal
from enum import Enum, auto
from functools import lru_cache

from gemserve.files.formats.rows import Row, lines_of
from gemserve.files.formats.zip_parts import Parts, events

_WORKBOOK = "xl/workbook.xml"
# formats that every workbook has, those of East Asia's dates among them
_OWN_FORMATS = {
    **{"9": "0%", "10": "0.00%", "46": "[h]:mm:ss"},
    **{str(number): "yyyy" for number in (*range(14, 23), *range(27, 37), 45, 47, *range(50, 59))},
}
# parts of a format that are no letters of a date: texts, colours, and widths of blanks
_NO_DATE = re.compile(r'"[^"]*"|\[[^\]]*\]|[\\_*].')
_DURATION = re.compile(r"\[(?:h+|m+|s+)\]", re.IGNORECASE)
_LAST_DAY = 2_958_465  # 9999-12-31
_EPOCH, _MARCH_1900 = datetime(1899, 12, 30), 61
_ESCAPED = re.compile(r"_x([0-9A-Fa-f]{4})_")  # a character that XML does not have
_COLUMN = re.compile(r"[A-Z]{1,3}")


class _Shown(Enum):
    NUMBER = auto()
    PADDED = auto()  # 01067, a place in Dresden
    PERCENT = auto()
    DATE = auto()
    DURATION = auto()


@dataclass(frozen=True, slots=True)
class _Book:
    """`styles`: the format in which each shows numbers. `epoch`: the day 0."""

    strings: list[str]
    styles: list[str]
    epoch: datetime


def read(content: bytes) -> str:
    parts = Parts(content, "XLSX")
    targets = parts.targets(_WORKBOOK)
    by_kind = dict(targets.values())
    sheets, epoch = [], _EPOCH
    for event, tag, attributes in events(parts.read(_WORKBOOK), _WORKBOOK):
        if event == "start" and tag == "workbookPr" and attributes.get("date1904") in ("1", "true"):
            epoch = datetime(1904, 1, 1)
        elif event == "start" and tag == "sheet" and attributes.get(":id") in targets:
            sheets.append((attributes.get("name", ""), targets[attributes[":id"]][1]))
    book = _Book(
        list(_strings(parts, by_kind.get("sharedStrings"))),
        list(_styles(parts, by_kind.get("styles"))),
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
            yield _ESCAPED.sub(lambda match: chr(int(match[1], 16)), "".join(pieces))
            pieces.clear()


def _styles(parts: Parts, name: str | None) -> Iterator[str]:
    """The format of each style of cells."""
    if name is None:
        return
    formats = dict(_OWN_FORMATS)
    is_within = False
    for event, tag, attributes in events(parts.read(name), name):
        if tag == "cellXfs":
            is_within = event == "start"
        elif event == "start" and tag == "numFmt":
            formats[attributes.get("numFmtId", "")] = attributes.get("formatCode", "")
        elif event == "start" and tag == "xf" and is_within:
            yield formats.get(attributes.get("numFmtId", "0"), "")


@lru_cache(1000)
def _shown(code: str) -> _Shown:
    """As what a format shows numbers, by its part for positive ones."""
    letters = _NO_DATE.sub("", code).lower().partition(";")[0]
    if letters and not letters.strip("0"):
        return _Shown.PADDED
    if _DURATION.search(code):
        return _Shown.DURATION
    if "general" not in letters and any(map(letters.__contains__, "ymdhs")):
        return _Shown.DATE
    return _Shown.PERCENT if "%" in letters else _Shown.NUMBER


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
    try:
        return _number(float(text), text, cell.get("s", "0"), book) if kind == "n" else text
    except (ValueError, OverflowError):
        return text


def _number(number: float, text: str, style: str, book: _Book) -> str:
    place = int(style[:9]) if style.isascii() and style.isdecimal() else 0
    code = book.styles[place] if place < len(book.styles) else ""
    shown = _shown(code)
    if shown is _Shown.PADDED and text.isdecimal():
        return text.zfill(code.partition(";")[0].count("0"))
    if shown is _Shown.DURATION:
        minutes, seconds = divmod(round(abs(number) * 86_400), 60)
        return f"{'-' * (number < 0)}{minutes // 60}:{minutes % 60:02}:{seconds:02}"
    if shown is _Shown.DATE and 0 <= number <= _LAST_DAY:
        return _date(number, book.epoch)
    if shown is _Shown.PERCENT:
        return _decimal(number * 100) + "%"
    return _decimal(number) if 1e-9 < abs(number) < 1e15 else text


def _decimal(number: float) -> str:
    """The digits that Excel has; files have two more, of what binary numbers cannot say."""
    return f"{Decimal(f'{number:.15g}'):f}"


def _date(days: float, epoch: datetime) -> str:
    if epoch == _EPOCH and 1 <= days < _MARCH_1900:  # Excel takes 1900 for a leap year
        days += 1
    moment = epoch + timedelta(seconds=round(days * 86_400))
    if days < 1:
        return moment.strftime("%H:%M:%S")
    return moment.strftime("%Y-%m-%d" if days == int(days) else "%Y-%m-%d %H:%M:%S")
