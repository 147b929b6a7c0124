"""Reads files with one JSON object a line."""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any

from gemserve.errors import shown


class BadLine(ValueError):
    """A line that is not a JSON object. The message says what is wrong with it."""

    def __init__(self, number: int, problem: str) -> None:
        super().__init__(problem)
        self.number = number


def parse_objects(content: bytes) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each line that is not blank: its number, from 1, and its object. Raises `BadLine`."""
    # splitlines would also split at U+2028 and others, which a JSON text may contain
    for number, line in enumerate(content.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if not line.strip():
            continue
        try:
            fields = json.loads(line.decode())
        except (ValueError, RecursionError) as error:
            raise BadLine(number, f"not JSON in UTF-8: {error}") from error
        if not isinstance(fields, dict):
            raise BadLine(number, f"{shown(fields)}: must be a JSON object")
        yield number, fields
