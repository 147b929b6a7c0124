"""Reads the files that a command is given."""

from __future__ import annotations

import sys
from pathlib import Path

from gemserve_client.cli.errors import Misused


def read_text(name: str) -> str:
    """A file's text, or that of standard input if the name is "-". Raises `Misused`."""
    try:
        content = sys.stdin.buffer.read() if name == "-" else Path(name).read_bytes()
        return content.decode("utf-8-sig")
    except OSError as error:
        raise Misused(f"{name}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise Misused(f"{name}: is not UTF-8 text") from error
