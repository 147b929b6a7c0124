"""Parse the bytes of a form with files (multipart/form-data, RFC 7578).

python-multipart, which FastAPI would use, takes a form that is cut off for a whole one. A document
would then be stored without its end.
"""

from __future__ import annotations

from dataclasses import dataclass
from email.message import Message
from email.parser import HeaderParser

from gemserve.errors import RequestError, shown

FORM = "multipart/form-data"
_MAX_FIELDS = 32
_MAX_HEADER_BYTES = 4096


@dataclass(frozen=True, slots=True)
class FormField:
    """The value of one field. `filename` is None if it is no file. `charset`: as it was sent."""

    value: bytes
    filename: str | None
    charset: str | None = None


def is_form(content_type: str) -> bool:
    return _header(content_type).get_content_type() == FORM


def parse_form(raw: bytes, content_type: str) -> dict[str, FormField]:
    """The fields by name. Raises `RequestError`."""
    boundary = _header(content_type).get_boundary()
    if not boundary:
        raise _wrong("its Content-Type names no boundary")
    delimiter = b"\r\n--" + boundary.encode("latin-1", "replace")
    # in front of the first delimiter there need not be a line end
    pieces = (b"\r\n" + raw).split(delimiter, _MAX_FIELDS + 2)
    if not pieces[-1].startswith(b"--"):
        raise _wrong(f"it has no end, or more than {_MAX_FIELDS} fields")
    fields: dict[str, FormField] = {}
    for piece in pieces[1:-1]:
        name, field = _parse_field(piece)
        if name in fields:
            raise RequestError(f"{name[:100]}: comes twice in the form", param=name[:100])
        fields[name] = field
    return fields


def _parse_field(piece: bytes) -> tuple[str, FormField]:
    padding, _, rest = piece.partition(b"\r\n")
    head, separator, value = rest.partition(b"\r\n\r\n")
    if padding.strip(b" \t") or not separator or len(head) > _MAX_HEADER_BYTES:
        raise _wrong("a field has no headers, or too long ones")
    try:
        return _named(head, value)
    except (LookupError, ValueError) as error:  # the charset of a name, which may be anything
        raise _wrong("the headers of a field cannot be read") from error


def _named(head: bytes, value: bytes) -> tuple[str, FormField]:
    """A field by its headers. Raises `RequestError`, and what the standard library raises."""
    # not the parser of bytes, which replaces what is not ASCII; browsers send names in UTF-8
    headers = HeaderParser().parsestr(head.decode("utf-8", "replace"))
    if headers.get_content_disposition() != "form-data":
        raise _wrong("a field has no Content-Disposition: form-data")
    name = headers.get_param("name", header="content-disposition")
    if not isinstance(name, str) or not name:
        raise _wrong("a field has no name")
    if headers.get("content-transfer-encoding", "binary").lower() not in ("binary", "8bit", "7bit"):
        raise _wrong(f"field {shown(name)} has a Content-Transfer-Encoding")
    return name, FormField(value, headers.get_filename(), headers.get_content_charset())


def _header(content_type: str) -> Message:
    message = Message()
    message["Content-Type"] = content_type
    return message


def _wrong(why: str) -> RequestError:
    return RequestError(f"the form is wrong: {why}", param=None, code="invalid_form")
