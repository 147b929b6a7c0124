"""JSON Schemas of fields whose validators demand more than their types say."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from gemserve.contract.filter_options import MAX_HEADS, MAX_KEEP, MAX_SEGMENT, MIN_KEEP, MIN_SEGMENT

Json = dict[str, Any]
TEXT: Json = {"type": "string", "minLength": 1}
MAX_INTEGER = 1 << 31  # of a field whose own limit is not known here, or lower
TOKEN: Json = {"type": "integer", "minimum": 0, "maximum": MAX_INTEGER}
TOKENS: Json = {"type": "array", "items": TOKEN, "minItems": 1}
TOKEN_KEYS: Json = {"propertyNames": {"pattern": "^(0|[1-9][0-9]{0,9})$"}}
OBJECT: Json = {"properties": {"type": {"const": "object"}}}
KEEP: Json = {
    "description": "A count of tokens, a fraction of the prompt, or as the attention asks for.",
    "anyOf": [
        {"type": "integer", "minimum": MIN_KEEP, "maximum": MAX_KEEP},
        {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
        {"const": "auto"},
        {"type": "null"},
    ],
}
SEGMENT_SIZE: Json = {
    "description": "The most tokens of a window in which documents are read.",
    "anyOf": [
        {"type": "integer", "minimum": MIN_SEGMENT, "maximum": MAX_SEGMENT},
        {"enum": ["auto", "off"]},
        {"type": "null"},
    ],
}
HEADS: Json = {
    "description": "The layers and heads that score tokens, instead of the calibrated ones.",
    "anyOf": [
        {
            "type": "array",
            "items": {
                "type": "array",
                "items": {"type": "integer", "minimum": 0, "maximum": MAX_INTEGER},
                "minItems": 2,
                "maxItems": 2,
            },
            "minItems": 1,
            "maxItems": MAX_HEADS,
            "uniqueItems": True,
        },
        {"type": "null"},
    ],
}


PROMPTS: list[Json] = [TEXT, TOKENS]
TEXT_PROMPT: Json = {"anyOf": [TEXT]}  # in `either`, in place of `PROMPTS`


def prompts(limit: int) -> Json:
    """One prompt, or up to `limit` prompts of the same kind."""
    return {"anyOf": [*PROMPTS, *(_several(prompt, limit) for prompt in PROMPTS)]}


def text_prompts(limit: int) -> Json:
    """One text, or up to `limit` texts: in `either`, in place of `prompts`."""
    return {"anyOf": [TEXT, _several(TEXT, limit)]}


def _several(prompt: Json, limit: int) -> Json:
    return {"type": "array", "items": prompt, "minItems": 1, "maxItems": limit}


def stops(limit: int, chars: int) -> Json:
    text = {**TEXT, "maxLength": chars}
    several = {"type": "array", "items": text, "maxItems": limit}
    return {"anyOf": [text, several, {"type": "null"}]}


def either(*forms: dict[str, Json | None]) -> Callable[[Json], None]:
    """For `json_schema_extra`: a body that must have one of these forms.

    A form maps fields to what they must be beyond their types; these fields are required. A field
    that maps to None must be null or left out.
    """

    def rewrite(schema: Json) -> None:
        common = {key: schema.pop(key) for key in list(schema) if key not in ("title", "$defs")}
        description = common.pop("description", None)
        schema["anyOf"] = [_form(deepcopy(common), form) for form in forms]
        if description is not None:
            schema["description"] = description

    return rewrite


def _form(schema: Json, form: dict[str, Json | None]) -> Json:
    for name, part in form.items():
        if part is None:
            schema["properties"][name] = {"type": "null"}
        else:
            schema["properties"][name] = {**_without_null(schema["properties"][name]), **part}
    required = [*schema.get("required", ()), *(n for n, part in form.items() if part is not None)]
    return {**schema, "required": sorted(set(required))}


def _without_null(schema: Json) -> Json:
    kinds = [kind for kind in schema.get("anyOf", ()) if kind != {"type": "null"}]
    rest = {key: value for key, value in schema.items() if key not in ("anyOf", "default")}
    if len(kinds) == 1:
        return {**rest, **kinds[0]}
    return {**rest, "anyOf": kinds} if kinds else rest
