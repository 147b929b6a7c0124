"""CSV and TSV: each row a line with the header's names. What is no table stays as it is."""

from __future__ import annotations

import csv
import re
from io import StringIO

from gemserve.files.formats import Refused
from gemserve.files.formats.rows import lines_of
from gemserve.files.plain_text import NotText, decode

MOST_CELL_CHARS = 1 << 20
_SEPARATORS = ",;|"  # beside tabs, which hardly stand in cells
_LOOKED_AT = 1 << 16  # characters
_QUOTED = re.compile(r'"[^"]*"')
_NAMED = re.compile(r'"?sep=(.)"?\r?\n')  # a line in front, which tells Excel the separator


def read(content: bytes) -> str:
    try:
        text = decode(content)
    except NotText as error:
        raise Refused(str(error)) from None
    named = _NAMED.match(text)
    text = text[named.end() :] if named else text
    first = next(filter(str.strip, _QUOTED.sub("", text[:_LOOKED_AT]).splitlines()), "")
    separator = "\t" if "\t" in first else max(_SEPARATORS, key=first.count)
    separator = named[1] if named else separator
    if separator not in first:
        return text
    csv.field_size_limit(MOST_CELL_CHARS)
    try:
        rows = csv.reader(StringIO(text, newline=""), delimiter=separator)
        return "\n".join(lines_of(dict(enumerate(row)) for row in rows))
    except csv.Error:  # a quotation mark without another one makes the rest of a file one cell
        return text
