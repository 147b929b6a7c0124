"""The text of a file: of plain text as it is, of PDF, DOCX and HTML what people read in them."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import zlib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Literal

from gemserve.errors import GemserveError

Kind = Literal["text", "pdf", "docx", "html"]
MOST_BYTES = 1 << 28  # of a file, and of what a packed one unpacks to
_PACKED = b"\x1f\x8b"
_LOOKED_AT = 1 << 13  # bytes, to tell whether it is text
_KINDS: dict[str, Kind] = {
    ".pdf": "pdf",
    ".docx": "docx",
    ".html": "html",
    ".htm": "html",
    ".xhtml": "html",
}
_CONTROLS = frozenset(range(32)) - {8, 9, 10, 12, 13, 27}  # that no text has
_MOST_FOREIGN = 0.3  # of bytes that are no ASCII, in a text that is not UTF-8


@dataclass(frozen=True, slots=True, kw_only=True)
class FileText:
    """`pages`: the first character of each page; empty if there are none."""

    text: str
    kind: Kind
    pages: tuple[int, ...] = ()


class NoText(Exception):
    """A file is left out, for the reason in the message."""


class Unreadable(NoText):
    """Nobody knows what is in the file, at least not now."""


def digest_of(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def read_bytes(path: Path) -> bytes:
    """Raises `NoText` if the file is too large or cannot be read."""
    try:
        size = path.stat().st_size
        if size > MOST_BYTES:
            raise NoText(f"has {size:,} bytes, the limit is {MOST_BYTES:,}; split it")
        return path.read_bytes()
    except OSError as error:
        raise Unreadable(f"cannot be read ({error.strerror or error})") from error


def text_of(content: bytes, name: str) -> FileText:
    """The text of the file with this content. Raises `NoText`, which says why there is none."""
    if name.endswith(".gz"):
        content, name = unpacked(content, MOST_BYTES), name.removesuffix(".gz")
    if not content.strip():
        raise NoText("is empty")
    kind = _KINDS.get(Path(name).suffix.lower(), "text")
    if kind == "text" and content.startswith(b"%PDF-"):
        kind = "pdf"
    if kind == "text":
        return FileText(text=_plain(content), kind="text")
    from gemserve.library.converting import convert

    try:
        text, pages = convert(content, name, kind)
    except GemserveError as error:
        raise NoText(str(error)) from error
    return FileText(text=text, kind=kind, pages=pages)


def unpacked(content: bytes, most_bytes: int) -> bytes:
    """What gzip has packed; the content itself if it is not packed, or no more.

    Raises `NoText` if it is cut off, or unpacks to more than `most_bytes`.
    """
    if not content.startswith(_PACKED):
        return content
    try:
        with gzip.open(BytesIO(content)) as packed:
            whole = packed.read(most_bytes + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise NoText(f"cannot be unpacked ({error})") from error
    if len(whole) > most_bytes:
        raise NoText(f"unpacks to more than {most_bytes:,} bytes, the limit")
    return whole


def _plain(content: bytes) -> str:
    for mark, encoding in ((codecs.BOM_UTF16_LE, "utf-16"), (codecs.BOM_UTF16_BE, "utf-16")):
        if content.startswith(mark):
            return _decoded(content, encoding)
    start = content[:_LOOKED_AT]
    if not _CONTROLS.isdisjoint(start):
        raise NoText("is no text")
    try:
        return _decoded(content, "utf-8-sig")
    except NoText:
        foreign = sum(byte >= 128 for byte in start)
        if foreign > _MOST_FOREIGN * len(start):
            raise
        return _decoded(content, "latin-1")


def _decoded(content: bytes, encoding: str) -> str:
    try:
        text = content.decode(encoding)
    except UnicodeDecodeError as error:
        raise NoText(f"is no text ({error.reason} at byte {error.start})") from error
    if "\0" in text:
        raise NoText("is no text")
    return text.replace("\r\n", "\n")
