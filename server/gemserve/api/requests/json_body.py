"""From the bytes of a body to a typed one, or the error that names what is wrong with it."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from gemserve.api.error_replies import from_validation, unknown_field
from gemserve.api.requests.base_bodies import Body
from gemserve.errors import RequestError

BodyT = TypeVar("BodyT", bound=Body)


def parse(raw: bytes, body_type: type[BodyT]) -> BodyT:
    """The body. Slow for a long one; raises `RequestError`."""
    try:
        content = from_json(raw)
    except ValueError as error:
        raise RequestError(
            f"the body is not valid JSON: {error}", param=None, code="invalid_json"
        ) from error
    if not isinstance(content, dict):
        raise RequestError("the body must be a JSON object", param=None, code="invalid_json")
    for name in content:  # before validation, which would collect an error for each of them
        if name not in body_type.model_fields:
            raise unknown_field(name)
    try:
        return body_type.model_validate(content)
    except ValidationError as error:
        raise from_validation(error, content) from error
