"""Values that Ollama's fields may have here, and why they may have no others."""

from __future__ import annotations

import re
from typing import Annotated, Any

from pydantic import Field, ValidationError, ValidatorFunctionWrapHandler, WrapValidator

_NUMBER = r"(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)"
# the sign of micro has two characters
_DURATION = rf"^[+-]?(?:{_NUMBER}|(?:{_NUMBER}(?:ns|us|\u00b5s|\u03bcs|ms|s|m|h))+)$"


def because(reason: str) -> WrapValidator:
    """Refuse a value that the field cannot have with this reason in place of pydantic's."""

    def check(value: Any, validate: ValidatorFunctionWrapHandler) -> Any:
        try:
            return validate(value)
        except ValidationError as error:
            raise ValueError(reason) from error

    return WrapValidator(check)


KeepAlive = Annotated[
    Annotated[str, Field(pattern=_DURATION, max_length=100)]
    | Annotated[float, Field(ge=-1e12, le=1e12)]
    | None,
    because('must be a number of seconds, or a duration such as "5m" or "1h30m"'),
]


def is_no_time(kept: str | float | None) -> bool:
    """Is it a duration of zero, however it is written?"""
    if isinstance(kept, str):
        return not re.search("[1-9]", kept)
    return kept == 0
