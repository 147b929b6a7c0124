"""Lists whose members say by their `type` what they are: each type that is not served is refused
with a reason, in an error that names the member's place.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from typing import Any

from pydantic import BeforeValidator, ConfigDict, Discriminator, Tag, model_validator
from pydantic_core import PydanticCustomError

from gemserve.api.requests.base_bodies import Body

TEXT_ONLY = "is not read: this server takes text only"
WRONG_TYPE = "wrong_type"  # the type of pydantic's error about a member whose type is at fault


class HistoryItem(Body):
    """A member whose further fields may be null: clients send replies back with every field."""

    model_config = ConfigDict(json_schema_extra={"additionalProperties": {"type": "null"}})

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, value: object) -> object:
        if not isinstance(value, dict):
            return value
        return {name: given for name, given in value.items() if given is not None}


def type_of(value: object, default: str | None = None) -> Any:
    """The `type` of a member, or of one that is parsed already."""
    given = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return default if given is None else given


def of_type(kind: str) -> Tag:
    """The tag of the member for a type. It is no name of a field: paths in errors leave it out."""
    return Tag(f"type {kind}")


def by_type(default: str | None = None) -> Discriminator:
    """For a union with a tag for each type. `default`: the type of a member that says none."""
    return Discriminator(lambda value: f"type {type_of(value, default)}")


def refuse_others(
    served: Collection[str],
    reasons: Mapping[str, str],
    *,
    default: str | None = None,
    otherwise: str | None = None,
    also: str | None = None,
) -> BeforeValidator:
    """Refuse the members whose type is not one of `served`.

    `reasons`: why some types are refused; a reason follows the type. `otherwise`: the reason for
    the other types that are texts; None: only the types that are served are listed. `also`: an
    expression that further types match which are taken.
    """
    listed = ", ".join(served)

    def check(value: object) -> object:
        if not isinstance(value, dict):
            raise PydanticCustomError("dict_type", "must be an object")
        kind = type_of(value, default)
        if isinstance(kind, str) and (kind in served or (also and re.fullmatch(also, kind))):
            return value
        reason = reasons.get(kind, otherwise) if isinstance(kind, str) else None
        if reason is not None:
            raise ValueError(f"{kind[:60]} {reason}")
        raise PydanticCustomError(WRONG_TYPE, f"must be one of {listed}")

    return BeforeValidator(check)
