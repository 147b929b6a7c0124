"""Request bodies of /v1/libraries."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field

from gemserve.api.requests.base_bodies import Body, LibraryName
from gemserve.api.requests.document_form import take_file
from gemserve.api.requests.field_schemas import Json
from gemserve.api.requests.form_body import parse_form
from gemserve.errors import RequestError, shown

_PATH = r"^[^\x00-\x1f\x7f]{1,512}$"


def _check_path(path: str) -> str:
    """Such parts are left out by whoever writes the path into an address, to delete the file."""
    if {".", ".."} & set(path.split("/")):
        raise ValueError('must have no part that is "." or ".."')
    return path


FilePath = Annotated[
    str,
    Field(pattern=_PATH, description="The file's name in the library."),
    AfterValidator(_check_path),
]
FORM_SCHEMA: Json = {
    "type": "object",
    "description": "A text, a PDF or another format. `path` is the file's own name if omitted.",
    "properties": {
        "file": {"type": "string", "contentMediaType": "text/plain"},
        "path": {"type": "string", "pattern": _PATH},
    },
    "required": ["file"],
    "additionalProperties": False,
}


class LibraryBody(Body):
    """A library to be made."""

    name: LibraryName


class LibraryFileBody(Body):
    """A text to be added, in place of the file of this path if there is one."""

    path: FilePath
    text: Annotated[str, Field(min_length=1)]


def parse_library_form(raw: bytes, content_type: str) -> tuple[str, bytes]:
    """The path and the content of the file that a form brings. Raises `RequestError`."""
    fields = parse_form(raw, content_type)
    file = take_file(fields)
    path = fields.pop("path", None)
    for name in fields:
        raise RequestError(f"{name[:100]}: unknown field", param=name[:100])
    given = file.filename if path is None else path.value.decode("utf-8", "replace")
    if not given or len(given) > 512 or not given.isprintable():
        raise RequestError(
            "path: must have 1 to 512 characters, none of them a control character", param="path"
        )
    try:
        return _check_path(given), file.value
    except ValueError as error:
        raise RequestError(f"path={shown(given)}: {error}", param="path") from None
