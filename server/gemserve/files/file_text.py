"""The text of a file: of plain text as it is, of other formats what people read in them.

Libraries, stored documents, uploads and `gemserve ask` all read files with `text_of`.
"""

from __future__ import annotations

import gzip
import hashlib
import zlib
from codecs import BOM_UTF8
from dataclasses import dataclass, replace
from io import BytesIO
from pathlib import Path

from gemserve.errors import GemserveError, PdfsBusy, RequestError
from gemserve.files.converting import LIMITS, PackageMissing, convert, kind_of
from gemserve.files.limited_process import Reading, ReadingLimits
from gemserve.files.plain_text import NotText, declared, decode

MOST_BYTES = 1 << 28  # of a file, and of what a packed one unpacks to
_PACKED, _PACKED_SUFFIX = b"\x1f\x8b", ".gz"
_OF_ANY_ENCODING = ("text", "csv", "html")


@dataclass(frozen=True, slots=True, kw_only=True)
class FileText:
    """`kind`: "text" or a key of `FORMATS`. `pages`: the first character of each page, if any."""

    text: str
    kind: str
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
    """The text of the file with this content.

    Raises `NoText`, which says why there is none, and `Unreadable` if there may be one.
    """
    try:
        read = read_file(content, name)
    except GemserveError as error:
        raise (Unreadable if _may_have_text(error) else NoText)(str(error)) from error
    return replace(read, text=read.text.replace("\r\n", "\n"))


def _may_have_text(error: GemserveError) -> bool:
    """Whether the file can be read at another time, or where more packages are installed."""
    if isinstance(error, RequestError):
        return error.code == "pdf_not_supported"
    return isinstance(error, (PdfsBusy, PackageMissing))


def read_file(
    content: bytes,
    name: str,
    limits: ReadingLimits = LIMITS,
    reading: Reading | None = None,
) -> FileText:
    """Likewise, with the line ends that the file has.

    Raises `NoText`, and what `convert` raises: `RequestError`, `PdfsBusy` and `LibraryError`.
    `reading`: ended by another thread when nobody wants the text any more.
    """
    if is_packed(name):
        content = unpacked(content, limits.unpacked_bytes or MOST_BYTES)
        name = name[: -len(_PACKED_SUFFIX)]
    if not content.strip():
        raise NoText("is empty")
    kind = kind_of(content, name)
    if kind != "text":
        text, pages = convert(content, name, kind, limits, reading)
        return FileText(text=text, kind=kind, pages=pages)
    try:
        text = decode(content, declared(content))
    except NotText as error:
        raise NoText(str(error)) from None
    if not text.strip():
        raise NoText("is empty")
    return FileText(text=text, kind=kind)


def is_plain(content: bytes, name: str) -> bool:
    """Whether a file is neither packed nor of another format than plain text."""
    return not is_packed(name) and kind_of(content, name) == "text"


def is_packed(name: str) -> bool:
    return name.lower().endswith(_PACKED_SUFFIX)


def in_utf_8(content: bytes, name: str, label: str) -> bytes:
    """A text of the encoding `label` in UTF-8 with its mark; other files as they are."""
    if content.startswith(_PACKED) or kind_of(content, name) not in _OF_ANY_ENCODING:
        return content
    try:
        return BOM_UTF8 + decode(content, label).encode("utf-8", "replace")
    except NotText:
        return content


def unpacked(content: bytes, most_bytes: int) -> bytes:
    """What gzip has packed; the content itself if it is not packed, or no more.

    Raises `NoText` if it is cut off, unpacks to more than `most_bytes`, or was packed twice.
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
    if whole.startswith(_PACKED):  # whoever unpacks it again would have no limit
        raise NoText("is packed twice; unpack it once")
    return whole
