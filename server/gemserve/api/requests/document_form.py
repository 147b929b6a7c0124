"""A document that comes as a form with a file, as OpenAI's /v1/files takes it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic_core import from_json

from gemserve.api.requests.document_body import MAX_NAME_CHARS, DocumentBody
from gemserve.api.requests.field_schemas import Json
from gemserve.api.requests.form_body import FormField, parse_form
from gemserve.api.requests.json_body import validate_body
from gemserve.errors import RequestError, shown
from gemserve.files.file_text import in_utf_8

_INTEGERS = ("ttl", "expires_after[seconds]")
_SWITCHES = {"true": True, "1": True, "false": False, "0": False}
_EXPIRY = "expires_after["
_SECONDS: Json = {"type": "integer", "minimum": 1, "maximum": 1 << 31}
FORM_SCHEMA: Json = {
    "type": "object",
    "description": "A text, a PDF or another format. Other fields mean what they mean in JSON.",
    "properties": {
        "file": {"type": "string", "contentMediaType": "text/plain"},
        "name": {"type": "string", "maxLength": MAX_NAME_CHARS},
        "ttl": _SECONDS,
        "pin": {"type": "boolean"},
        "wait": {"type": "boolean"},
        "system": {"type": "string"},
        "model": {"type": "string"},
        "adapter": {"type": "string"},
        "filter": {"type": "string", "description": "A method's name, or the object as JSON."},
        "purpose": {"type": "string", "description": "Without effect."},
        "expires_after[anchor]": {"const": "created_at"},
        "expires_after[seconds]": _SECONDS,
    },
    "required": ["file"],
    "dependentRequired": {
        "expires_after[anchor]": ["expires_after[seconds]"],
        "expires_after[seconds]": ["expires_after[anchor]"],
    },
    "additionalProperties": False,
}

FILE_SCHEMA: Json = {
    "type": "object",
    "description": "A text, a PDF, or a file of another format.",
    "properties": {"file": {"type": "string", "contentMediaType": "application/pdf"}},
    "required": ["file"],
    "additionalProperties": False,
}


def parse_document_form(raw: bytes, content_type: str, text: str) -> DocumentBody:
    """The form as a body; the file's name is the document's if no other is given.

    `text`: of the file. Raises `RequestError`.
    """
    fields = parse_form(raw, content_type)
    file = take_file(fields)
    content: dict[str, Any] = {"text": text}
    if file.filename:
        content["name"] = file.filename[-MAX_NAME_CHARS:]
    for name, field in fields.items():
        value = _value_of(name, field)
        if name.startswith(_EXPIRY):
            content.setdefault("expires_after", {})[name[len(_EXPIRY) : -1]] = value
        elif name == "text":
            raise RequestError("text: not together with file", param="text")
        else:
            content[name] = value
    return validate_body(content, DocumentBody)


def find_file(raw: bytes, content_type: str) -> FormField:
    """The form's file. Raises `RequestError` if the form is wrong."""
    return take_file(parse_form(raw, content_type))


def parse_file_form(raw: bytes, content_type: str) -> FormField:
    """The file of a form that has nothing else. Raises `RequestError`."""
    fields = parse_form(raw, content_type)
    file = take_file(fields)
    for name in fields:
        raise RequestError(f"{name[:100]}: unknown field", param=name[:100])
    return file


def take_file(fields: dict[str, FormField]) -> FormField:
    """The file, in UTF-8 if it is a text of which the form names another encoding."""
    file = fields.pop("file", None)
    if file is None:
        raise RequestError("file: required", param="file", code="missing_field")
    if file.charset is None:
        return file
    return replace(file, value=in_utf_8(file.value, file.filename or "", file.charset))


def read_switch(name: str, text: str) -> bool:
    """Raises `RequestError` unless the text means true or false."""
    value = _SWITCHES.get(text.lower())
    if value is None:
        raise RequestError(f"{name}={shown(text)}: must be true or false", param=name)
    return value


def _value_of(name: str, field: FormField) -> Any:
    text = _text_of(field, name[:100])
    if name in _INTEGERS:
        if not (text.isascii() and text.isdecimal() and len(text) <= 20):
            raise RequestError(f"{name}={shown(text)}: must be a whole number", param=name)
        return int(text)
    if name in ("pin", "wait"):
        return read_switch(name, text)
    if name == "filter" and text.startswith("{"):
        try:
            return from_json(text)
        except ValueError as error:
            raise RequestError(f"filter: is not valid JSON: {error}", param="filter") from error
    return text


def _text_of(field: FormField, name: str) -> str:
    try:
        return field.value.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise RequestError(f"{name}: is not UTF-8 text (byte {error.start})", param=name) from error
