"""What becomes of a client's schema before it is compiled."""

from __future__ import annotations

import re
from copy import deepcopy
from datetime import date
from itertools import product
from typing import Any

import jsonschema
import pytest

from gemserve.decoding.schema_preparation import prepare_schema
from tests.schemas import random_schema

A, B = {"properties": {"a": {"type": "string"}}}, {"properties": {"b": {"type": "string"}}}


def prepared(schema: dict[str, Any], *, is_strict: bool = False) -> dict[str, Any]:
    before = deepcopy(schema)
    result = prepare_schema(schema, is_strict=is_strict)
    assert schema == before
    return result


def closed(schema: dict[str, Any]) -> dict[str, Any]:
    return {**schema, "additionalProperties": False}


def test_smolagents_objects_are_closed_at_every_depth() -> None:
    """A small model invented keys until `max_tokens`."""
    inner = {"type": "object", **A}
    schema = {
        "type": "object",
        "properties": {
            "one": inner,
            "many": {"type": "array", "items": inner},
            "pair": {"type": "array", "prefixItems": [inner]},
            "either": {"anyOf": [inner, {"type": "null"}]},
            "named": {"$ref": "#/$defs/x"},
            "map": {"type": "object", "additionalProperties": inner},
        },
        "$defs": {"x": inner},
    }
    done = prepared(schema)
    assert done["additionalProperties"] is False
    assert done["$defs"]["x"] == closed(inner)
    fields = done["properties"]
    assert fields["one"] == fields["many"]["items"] == closed(inner)
    assert fields["pair"]["prefixItems"] == [closed(inner)]
    assert fields["either"]["anyOf"] == [closed(inner), {"type": "null"}]
    assert fields["map"]["additionalProperties"] == closed(inner)
    assert prepared({"type": "object", "properties": {}}) == closed(
        {"type": "object", "properties": {}}
    )


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "object"},
        {**A, "additionalProperties": True},
        {**A, "additionalProperties": {"type": "string"}},
        {**A, "unevaluatedProperties": False},
        {**A, "patternProperties": {"^x": {"type": "string"}}},
        {**A, "required": ["b"]},
        {**A, "minProperties": 2},
        {"allOf": [A, B]},
        {**A, "allOf": [B]},
        {**A, "anyOf": [B, {"required": ["c"]}]},
        {**A, "$ref": "#/$defs/b", "$defs": {"b": B}},
        {"allOf": [{"$ref": "#/$defs/a"}, B], "$defs": {"a": A}},
        {"allOf": [{"$ref": "#/$defs/c"}, B], "$defs": {"a": A, "c": {"$ref": "#/$defs/a"}}},
        {**A, "if": A, "then": B},
        {**A, "dependentSchemas": {"a": B}},
        {"allOf": [{"$ref": "other.json"}, B]},
        {"enum": [A], "const": A, "default": A, "examples": [A]},
        {"$defs": {"a": {"$id": "urn:x", "allOf": [{"$ref": "#/$defs/b"}, A], "$defs": {"b": B}}}},
    ],
)
def test_maps_and_objects_that_others_add_to_stay_open(schema: dict[str, Any]) -> None:
    assert prepared(schema) == schema


def test_one_member_of_all_of_adds_nothing() -> None:
    """Older pydantic writes so where a reference has a description."""
    schema = {"allOf": [{"$ref": "#/$defs/a"}], "description": "x", "$defs": {"a": A}}
    assert prepared(schema)["$defs"]["a"] == closed(A)


def test_a_schema_that_refers_to_itself_is_closed() -> None:
    schema = {"properties": {"next": {"$ref": "#"}}, "type": "object"}
    assert prepared(schema) == closed(schema)


def test_a_property_may_have_the_name_of_a_keyword() -> None:
    schema = {"properties": {"properties": A, "format": {"type": "string"}, "pattern": {}}}
    assert prepared(schema) == closed(
        {"properties": {**schema["properties"], "properties": closed(A)}}
    )


def test_pydantic_s_formats_are_annotations() -> None:
    """`format: path` was refused."""
    for name in ("path", "binary", "password", "int32", "unknown"):
        assert prepared({"type": "string", "format": name}, is_strict=True) == {"type": "string"}
    for name in ("uri", "uuid", "email"):
        assert prepared({"format": name})["format"] == name
    both = {"format": "date", "pattern": "^2"}
    assert prepared(both) == both


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        (
            "date",
            ["2024-02-28", "1999-12-31", "2001-04-30"],
            ["2024-02-30", "2024-04-31", "0000-01-01"],
        ),
        ("time", ["23:59:59Z", "01:00:00.25+02:00"], ["24:00:00Z", "01:41:60Z", "1:00:00Z"]),
        ("date-time", ["2024-02-28T23:59:59Z"], ["2024-02-28", "2024-02-28T23:59:60Z"]),
        ("duration", ["P1D", "P2W", "PT5M", "P1Y2M3DT4H5M6S"], ["P", "PT", "P1DT", "P12345678D"]),
    ],
)
def test_dates_are_ones_that_libraries_read(name: str, good: list[str], bad: list[str]) -> None:
    """The compiler's own formats have the second 60, which datetime refuses."""
    done = prepared({"type": "string", "format": name})
    assert "format" not in done
    for text in good:
        jsonschema.validate(text, done)
    for text in bad:
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(text, done)


def test_the_days_of_a_calendar_are_dates() -> None:
    """No answer could be 29 February."""
    pattern = re.compile(prepared({"type": "string", "format": "date"})["pattern"])
    for year in (1999, 2000, 2001, 2024, 2100, 2400):
        for month, day in product(range(14), range(33)):
            text = f"{year}-{month:02}-{day:02}"
            assert bool(pattern.search(text)) == is_date(text), text


def is_date(text: str) -> bool:
    try:
        date.fromisoformat(text)
    except ValueError:
        return False
    return True


def test_a_version_of_uuid_is_held() -> None:
    done = prepared({"type": "string", "format": "uuid4"})
    jsonschema.validate("123e4567-e89b-42d3-a456-426614174000", done)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate("123e4567-e89b-12d3-a456-426614174000", done)


DECIMAL = r"^(?!^[-+.]*$)[+-]?0*\d*\.?\d*$"


@pytest.mark.parametrize(
    ("pattern", "stays"),
    [
        (DECIMAL, False),
        (r"(?<!a)b", False),
        (r"(?<=a)b", False),
        (r"(a)\1", False),
        (r"(?P<x>a)\k<x>", False),
        (r"^\bfoo\b$", False),
        (r"a\B", False),
        (r"a\0", False),
        (r"\cA", False),
        (r"\<a", False),
        (r"[\b]", False),
        (r"[\cA]", False),
        (r"[a[]", False),
        (r"\\b", True),
        (r"[\\b\[]\[[^k<>bBc0]", True),
        (r"\(?=", True),
        (r"[(?=]", True),
        (r"[\](?=]", True),
        (r"(?:a|b)(?P<x>c)(?i)\\1", True),
        (r"(", True),
    ],
)
def test_a_pattern_that_cannot_be_held_is_left_out(pattern: str, stays: bool) -> None:
    schema = {"type": "string", "pattern": pattern}
    assert prepared(schema) == (schema if stays else {"type": "string"})
    assert prepared(schema, is_strict=True) == schema


FLAG, TEXT = {"type": "boolean"}, {"type": "string"}


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({r"\bx": FLAG}, {"patternProperties": {}, "additionalProperties": FLAG}),
        (
            {r"\bx": FLAG, "(?!a)": TEXT, "^b": TEXT},
            {"patternProperties": {"^b": TEXT}, "additionalProperties": {"anyOf": [FLAG, TEXT]}},
        ),
    ],
)
def test_a_pattern_of_names_that_cannot_be_held_is_left_out(
    given: dict[str, Any], expected: dict[str, Any]
) -> None:
    """A schema that is not strict was refused for it. The values stay what they must be."""
    schema = {"type": "object", "patternProperties": given}
    assert prepared(schema) == prepared(closed(schema)) == {"type": "object", **expected}
    assert prepared(schema, is_strict=True) == closed(schema)
    open_map = {**schema, "additionalProperties": True}
    assert prepared(open_map) == {**open_map, "patternProperties": expected["patternProperties"]}
    others = {**schema, "additionalProperties": {"type": "null"}}
    assert prepared(others)["additionalProperties"]["anyOf"][0] == {"type": "null"}


def test_pydantic_s_decimal_is_a_number() -> None:
    """Its other form is a text with look-ahead. Any text would do without, and none would parse."""
    number = {"type": "number", "minimum": 0, "maximum": 10**15}
    text = {"type": "string", "pattern": DECIMAL}
    for is_strict in (False, True):
        assert prepared({"anyOf": [number, text]}, is_strict=is_strict) == {"anyOf": [number]}


def test_a_schema_that_says_it_all_stays_as_it_is() -> None:
    for seed in range(30):
        schema = random_schema(seed)
        assert prepared(schema) == schema


@pytest.mark.parametrize(
    ("kind", "most"),
    [
        ("number", 10**15),
        (["number", "null"], 10**15),
        ("integer", 9 * 10**18),
        (["null", "integer"], 9 * 10**18),
    ],
)
def test_numbers_get_the_bounds_that_they_lack(kind: Any, most: int) -> None:
    """Bug: a model wrote 3.02e8928, which `Decimal` reads and JSON's readers take for infinity.

    Another one wrote digits of an integer until max_tokens.
    """
    both = {"minimum": -most, "maximum": most}
    for given, added in (
        ({}, both),
        ({"minimum": 3}, {"maximum": most}),
        ({"exclusiveMinimum": 0}, {"maximum": most}),
        ({"maximum": 3}, {"minimum": -most}),
        ({"exclusiveMaximum": 10**30}, {"minimum": -most}),
        ({"multipleOf": 5}, both),
        ({"minimum": 10**30}, {}),
        ({"maximum": -(10**30)}, {}),
        ({"minimum": 1, "maximum": 10**30}, {}),
        ({"enum": [10**20]}, {}),
        ({"const": 10**20}, {}),
        ({"minimum": "x"}, {}),
    ):
        assert prepared({"type": kind, **given}) == {"type": kind, **given, **added}


def test_maps_with_patterns_of_names_are_closed() -> None:
    """A model called `dict[Pattern, bool]` with names of its own in 34 of 40 answers."""
    schema = {"type": "object", "patternProperties": {"^[a-z]{3}$": {"type": "boolean"}}}
    assert prepared(schema) == closed(schema)
    for name, value in (("required", ["x"]), ("minProperties", 2), ("additionalProperties", A)):
        assert prepared({**schema, name: value}).get("additionalProperties") is not False
