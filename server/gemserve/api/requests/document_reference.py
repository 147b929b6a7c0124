"""The id of a stored document in a body. The body then holds the document."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PlainValidator, ValidationInfo
from pydantic_core import PydanticCustomError

from gemserve.api.documents.document_store import ID_PATTERN, Document
from gemserve.api.documents.finder import Finder

NOT_FOUND = "document_not_found"  # the type of pydantic's error


def _find(value: object, info: ValidationInfo) -> Document:
    if not isinstance(value, str):
        raise PydanticCustomError("string_type", "Input should be a valid string")
    finder: Finder | None = info.context
    document = None if finder is None else finder.find(value)
    if document is None:
        raise PydanticCustomError(NOT_FOUND, "no such document")
    return document


DocumentReference = Annotated[
    Document,
    PlainValidator(
        _find,
        json_schema_input_type=Annotated[
            str,
            Field(pattern=ID_PATTERN, description="The id of a stored document, for its text."),
        ],
    ),
]
