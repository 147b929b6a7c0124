"""Reads files of other formats, in processes of their own with limits on time, memory and output.

This module is also the program of such a process.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from dataclasses import replace
from pathlib import PurePath

from gemserve.errors import LibraryError
from gemserve.files import formats
from gemserve.files.limited_process import (
    Reading,
    ReadingLimits,
    limit_this_process,
    run_reader,
)
from gemserve.files.pdf_text import has_pdf_mark, read_pdf

LIMITS = ReadingLimits(text_bytes=1 << 27)
_MEMORY_BYTES = 2 << 30  # HTML takes more for its size than pages of a PDF
_SHOWN_CHARS = 200


class PackageMissing(LibraryError):
    """A format is not read here, because a package of `gemserve[library]` is not installed."""


def kind_of(content: bytes, name: str) -> str:
    """ "pdf", a key of `FORMATS`, or "text"."""
    suffix = PurePath(name).suffix
    if has_pdf_mark(content, is_named=suffix.lower() == ".pdf"):
        return "pdf"
    return formats.find_kind(content, suffix) or "text"


def convert(
    content: bytes, name: str, kind: str, limits: ReadingLimits, reading: Reading | None = None
) -> tuple[str, tuple[int, ...]]:
    """The text of the file called `name`, and the first character of each page, if there are any.

    `kind`: of `kind_of`, but not "text". Raises `RequestError` for PDFs and `LibraryError` for the
    others, which say why there is no text, and `PdfsBusy`. If `reading` is ended, it raises one of
    them soon.
    """
    if kind == "pdf":
        pdf = read_pdf(content, name, limits, reading)
        return pdf.text, pdf.page_starts
    if any(importlib.util.find_spec(each) is None for each in formats.FORMATS[kind].needs):
        raise PackageMissing(
            f'is {kind.upper()}, which is not read here: pip install "gemserve[library]"'
        )
    limits = replace(limits, memory_bytes=max(limits.memory_bytes, _MEMORY_BYTES))
    given = (kind, limits.text_bytes, limits.cpu_s, limits.memory_bytes)
    status, output = run_reader(__name__, given, content, limits.wall_s, reading)
    if status:
        raise LibraryError(limits.reason_costly)
    said = json.loads(output)
    if "reason" in said:
        raise LibraryError(said["reason"])
    return said["text"], ()


def _main() -> None:
    """Read a file from stdin; write its text, or why there is none, as JSON."""
    kind, *numbers = sys.argv[1:]
    text_bytes, cpu_s, memory_bytes = map(int, numbers)
    limit_this_process(cpu_s, memory_bytes)
    logging.disable()
    sys.stdout.write(json.dumps(_reply(kind, sys.stdin.buffer.read(), text_bytes)))


def _reply(kind: str, content: bytes, text_bytes: int) -> dict[str, str]:
    try:
        text = formats.read(kind, content).replace("\0", "").encode("utf-8", "replace")
    except formats.Refused as error:
        return {"reason": str(error)}
    except MemoryError:
        raise
    except RecursionError:
        return {"reason": f"cannot be read as {kind.upper()}: its parts are nested too deeply"}
    except Exception as error:  # the libraries raise whatever a broken file leads to
        cause = f"{type(error).__name__}: {error}"[:_SHOWN_CHARS]
        return {"reason": f"cannot be read as {kind.upper()} ({cause})"}
    if len(text) > text_bytes:
        return {"reason": f"has more than {text_bytes:,} bytes of text, the limit"}
    return {"text": text.decode().strip()} if text.strip() else {"reason": "has no text"}


if __name__ == "__main__":
    _main()
