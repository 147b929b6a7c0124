"""Integers of request bodies. 2.0 counts as one, as in JSON Schema: JSON has one kind of number."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field, WithJsonSchema

from gemserve.api.requests import field_schemas


def _to_integer(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _to_integers(value: object) -> object:
    # The types are looked at first: lists of millions are common, and hardly ever have floats.
    if isinstance(value, list) and float in set(map(type, value)):
        return [_to_integer(item) for item in value]
    return value


INTEGRAL = BeforeValidator(_to_integer)
INTEGRAL_ITEMS = BeforeValidator(_to_integers)
Natural = Annotated[int, Field(ge=0, le=field_schemas.MAX_INTEGER), INTEGRAL]
TopK = Annotated[
    int,
    Field(ge=-1, le=field_schemas.MAX_INTEGER, description="0 and -1: off."),
    INTEGRAL,
    AfterValidator(lambda count: max(0, count)),
]
Count = Annotated[int, Field(ge=1, le=field_schemas.MAX_INTEGER), INTEGRAL]
Integer = Annotated[
    int, Field(ge=-field_schemas.MAX_INTEGER, le=field_schemas.MAX_INTEGER), INTEGRAL
]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63), INTEGRAL]
TokenId = Annotated[int, WithJsonSchema(field_schemas.TOKEN)]  # the vocabulary is checked later
TokenIds = Annotated[list[TokenId], Field(fail_fast=True), INTEGRAL_ITEMS]
