"""Reads the files for training and conversion: plain texts, and JSON objects one a line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gemserve.errors import AdapterError, shown
from gemserve.json_lines import BadLine, parse_objects

_ROLES = ("system", "developer", "user", "assistant", "tool")


def read_text(path: Path) -> str:
    """Read a file. Raises `AdapterError` if it does not exist or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise AdapterError(f"{path}: cannot be read: {error}") from error


def read_objects(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """The objects of a file with their line numbers. Raises `AdapterError`."""
    try:
        yield from parse_objects(path.read_bytes())
    except OSError as error:
        raise AdapterError(f"{path}: cannot be read: {error}") from error
    except BadLine as error:
        raise AdapterError(f"{path}: line {error.number}: {error}") from error


def check_chat(messages: object) -> list[dict[str, str]]:
    """Check that messages end in an assistant's answer. Raises `ValueError`."""
    if not isinstance(messages, list) or len(messages) < 2:
        raise ValueError("messages: must be a list of at least 2")
    for index, message in enumerate(messages):
        where = f"messages[{index}]"
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise ValueError(f"{where}: must have a role: one of {', '.join(_ROLES)}")
        content = message.get("content")
        if not isinstance(content, str) or not content:
            raise ValueError(f"{where}.content={shown(content)}: must be a text, and not empty")
        _check_unicode(where, content)
    if messages[-1]["role"] != "assistant":
        raise ValueError("messages: must end in an assistant's answer to others")
    return messages


def check_text(name: str, value: object) -> str:
    """Check that a text is not empty. Raises `ValueError`."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"{name}={shown(value)}: must be a text, and not empty")
    _check_unicode(name, value)
    return value


def _check_unicode(name: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can contain half of a surrogate pair
        raise ValueError(f"{name}: is not valid Unicode") from None
