"""The arguments of calls as values, for protocols that do not send them as JSON texts."""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from pydantic_core import from_json


def parse_arguments(arguments: str) -> dict[str, Any]:
    """The arguments as an object; what is cut off, or too deep for Python, is empty.

    Numbers beyond what a double holds become its largest, and half characters become "?".
    """
    try:
        value = json.loads(arguments, parse_int=_integer, parse_float=_double)
        written = json.dumps(value, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
        value = json.loads(written)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def text_argument(arguments: str, name: str) -> str:
    """The text of that name, as far as it has come; other arguments are given back as they are."""
    try:
        value = from_json(arguments)
    except ValueError:
        return _text_so_far(arguments, name)
    text = value.get(name) if isinstance(value, dict) else None
    return text if isinstance(text, str) else arguments


def _text_so_far(arguments: str, name: str) -> str:
    try:
        value = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:  # half a character, for example
        return arguments
    text = value.get(name) if isinstance(value, dict) else None
    return text if isinstance(text, str) else ""


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= 300 else _double(digits)


def _double(digits: str) -> float:
    value = float(digits)
    return value if math.isfinite(value) else math.copysign(sys.float_info.max, value)
