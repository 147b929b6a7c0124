"""Integers of request bodies. JSON has one kind of number, so 2.0 is one too, as in JSON schema."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field, WithJsonSchema

from gemserve.api.requests import field_schemas


def _whole(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _whole_items(value: object) -> object:
    # seen from the types first: lists of millions are common, and hardly ever have floats
    if isinstance(value, list) and float in set(map(type, value)):
        return [_whole(item) for item in value]
    return value


WHOLE = BeforeValidator(_whole)
WHOLE_ITEMS = BeforeValidator(_whole_items)
Natural = Annotated[int, Field(ge=0, le=1 << 31), WHOLE]
Count = Annotated[int, Field(ge=1, le=1 << 31), WHOLE]
Seed = Annotated[int, Field(ge=-(1 << 63), lt=1 << 63), WHOLE]
TokenId = Annotated[int, WithJsonSchema(field_schemas.TOKEN)]  # the vocabulary is checked later
TokenIds = Annotated[list[TokenId], Field(fail_fast=True), WHOLE_ITEMS]
