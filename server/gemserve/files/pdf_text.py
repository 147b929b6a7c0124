"""Reads the text of PDF files. This module is also the program of the process that does it."""

from __future__ import annotations

import importlib.util
import json
import logging
import sys
from dataclasses import dataclass
from typing import Any

from gemserve.errors import RequestError, shown
from gemserve.files.limited_process import (
    Reading,
    ReadingLimits,
    limit_this_process,
    run_reader,
)

_MAGIC = b"%PDF-"
_MAGIC_WITHIN = 1024  # readers accept so many bytes before it
_SHOWN_CHARS = 200
_BETWEEN_PAGES = "\n\n"
_LIGATURES = str.maketrans(
    {"\ufb00": "ff", "\ufb01": "fi", "\ufb02": "fl", "\ufb03": "ffi", "\ufb04": "ffl"}
)


@dataclass(frozen=True, slots=True)
class PdfText:
    """The text of a PDF. An empty line stands between two pages.

    `page_starts`: the first character of each page; a page without text begins where the next does.
    """

    text: str
    num_pages: int
    page_starts: tuple[int, ...] = ()


def has_pdf_mark(content: bytes, *, is_named: bool) -> bool:
    """`is_named`: its name says that it is a PDF. Other texts may have the mark further on."""
    start = content[:_MAGIC_WITHIN]
    return _MAGIC in start if is_named or b"\0" in start else start.lstrip().startswith(_MAGIC)


def read_pdf(
    content: bytes, name: str, limits: ReadingLimits, reading: Reading | None = None
) -> PdfText:
    """The text of the file called `name`. It blocks for at most `limits.wall_s` seconds.

    Raises `RequestError`, whose message names the file, the reason and the limit, and `PdfsBusy`.
    If `reading` is ended, it raises one of them soon.
    """
    if importlib.util.find_spec("pypdf") is None:
        raise _refusal(
            name,
            'is a PDF, which is not read here: pip install "gemserve[pdf]", or convert the file to '
            "text first",
            "pdf_not_supported",
        )
    given = (limits.text_bytes, limits.pages, limits.cpu_s, limits.memory_bytes)
    status, output = run_reader(__name__, given, content, limits.wall_s, reading)
    if status:  # ended by a limit
        said: dict[str, Any] = {"code": "pdf_too_large", "reason": ""}
    else:
        said = json.loads(output)
    if said.get("code") == "pdf_too_large" and not said["reason"]:
        said["reason"] = limits.reason_costly
    if "code" in said:
        raise _refusal(name, said["reason"], said["code"])
    return PdfText(said["text"], said["pages"], tuple(said["starts"]))


def _refusal(name: str, reason: str, code: str) -> RequestError:
    return RequestError(f"file: {shown(name)} {reason}.", param="file", code=code)


class _Refused(Exception):
    """What the process replies in place of a text: a code, and a reason without the file's name."""

    def __init__(self, code: str, reason: str) -> None:
        super().__init__(reason)
        self.code = code


def _main() -> None:
    """Read a PDF from stdin; write its text, or why there is none, as JSON."""
    text_bytes, pages, cpu_s, memory_bytes = map(int, sys.argv[1:])
    limit_this_process(cpu_s, memory_bytes)
    logging.disable()
    try:
        reply: dict[str, Any] = _read(sys.stdin.buffer.read(), text_bytes, pages)
    except _Refused as error:
        reply = {"code": error.code, "reason": str(error)}
    except MemoryError:
        reply = {"code": "pdf_too_large", "reason": ""}
    except Exception as error:  # the library raises whatever a broken file leads to
        cause = f"{type(error).__name__}: {error}"[:_SHOWN_CHARS]
        reply = {"code": "pdf_invalid", "reason": f"cannot be read as a PDF ({cause})"}
    sys.stdout.write(json.dumps(reply))


def _read(content: bytes, text_bytes: int, max_pages: int) -> dict[str, Any]:
    from io import BytesIO

    from pypdf import PdfReader
    from pypdf.errors import LimitReachedError

    reader = PdfReader(BytesIO(content))
    if reader.is_encrypted and not _can_decrypt(reader):
        raise _Refused("pdf_encrypted", "is encrypted; save it without a password first")
    num_pages = len(reader.pages)
    if num_pages > max_pages:
        raise _Refused("pdf_too_large", f"has {num_pages} pages, the limit is {max_pages}")
    texts: list[str] = []
    starts: list[int] = []
    num_bytes, num_chars = 0, 0
    for page in reader.pages:
        try:
            raw = page.extract_text()
        except LimitReachedError:  # the library's own, on what a stream may unpack to
            raise _Refused("pdf_too_large", "") from None
        text = cleaned(raw)
        num_bytes += len(text.encode()) + 2
        if num_bytes > text_bytes:
            raise _Refused(
                "pdf_too_large",
                f"has more than {text_bytes} bytes of text, the limit (--max-document-bytes)",
            )
        starts.append(num_chars)
        if text:
            texts.append(text)
            num_chars += len(text) + len(_BETWEEN_PAGES)
    if not texts:
        raise _Refused(
            "pdf_without_text",
            f"has no text on its {num_pages} page(s); if it is a scan, recognise the text (OCR) "
            "first",
        )
    text = _BETWEEN_PAGES.join(texts)
    # behind the last text no line follows
    starts = [min(start, len(text)) for start in starts]
    return {"text": text, "pages": num_pages, "starts": starts}


def cleaned(raw: str) -> str:
    """A page's text without what is only typesetting: models read "file" worse with a ligature."""
    text = raw.replace("\0", "").translate(_LIGATURES)
    return text.encode("utf-8", "replace").decode().strip()


def _can_decrypt(reader: Any) -> bool:
    """Whether the file opens without a password, as one does that only forbids printing."""
    from pypdf.errors import DependencyError

    try:
        return bool(reader.decrypt(""))
    except (DependencyError, NotImplementedError):  # an algorithm that is not installed or known
        return False


if __name__ == "__main__":
    _main()
