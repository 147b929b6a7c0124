"""From the bytes of a body to a typed one, or the error that names what is wrong with it."""

from __future__ import annotations

from typing import TypeVar

from pydantic import ValidationError
from pydantic_core import from_json

from gemserve.api.errors import from_validation, unknown_field
from gemserve.api.schemas import Body
from gemserve.errors import ModelNotFound, RequestError

BodyT = TypeVar("BodyT", bound=Body)


def parse(raw: bytes, body_type: type[BodyT], model_name: str) -> BodyT:
    """The body, meant for the model that is served. Slow for a long one; raises `RequestError`."""
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
        body = body_type.model_validate(content)
    except ValidationError as error:
        raise from_validation(error, content) from error
    model = content.get("model")  # which some bodies may leave out
    if model is not None and model != model_name:
        raise ModelNotFound(model=model, served=model_name)
    return body
