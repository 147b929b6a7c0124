"""Random JSON schemas whose every value is short, and schemas meant to hurt."""

from __future__ import annotations

from random import Random
from typing import Any

Schema = dict[str, Any]


def random_schema(seed: int) -> Schema:
    """An object of a few properties; strings, arrays and numbers are all bounded."""
    return _object(Random(seed), depth=3)


def _value(rng: Random, depth: int) -> Schema:
    kinds = [_string, _integer, _number, _enum, _boolean, _pattern]
    if depth > 0:
        kinds += [_object, _array, _any_of]
    return rng.choice(kinds)(rng, depth - 1)


def _object(rng: Random, depth: int) -> Schema:
    names = rng.sample(["id", "name", "größe", "tags", 'quo"ted', "a b", ""], rng.randint(1, 4))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def _array(rng: Random, depth: int) -> Schema:
    low = rng.randint(0, 2)
    high = low + rng.randint(0, 2)
    return {"type": "array", "items": _value(rng, depth), "minItems": low, "maxItems": high}


def _any_of(rng: Random, depth: int) -> Schema:
    return {"anyOf": [_value(rng, depth) for _ in range(rng.randint(1, 3))]}


def _string(rng: Random, depth: int) -> Schema:
    low = rng.randint(0, 4)
    return {"type": "string", "minLength": low, "maxLength": low + rng.randint(0, 8)}


def _pattern(rng: Random, depth: int) -> Schema:
    return {"type": "string", "pattern": rng.choice(["^[a-f]{2,5}$", "^(x|yz)?-[0-9]{3}$"])}


def _integer(rng: Random, depth: int) -> Schema:
    low = rng.randint(-1000, 1000)
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 500)}


def _number(rng: Random, depth: int) -> Schema:
    low = rng.randint(-10, 10)  # without a step it could have any number of digits
    return {"type": "number", "minimum": low, "maximum": low + 7, "multipleOf": 0.25}


def _enum(rng: Random, depth: int) -> Schema:
    return {"enum": rng.sample([None, True, "yes", "né\n", 3, -1.5, {"k": [1, "x"]}], 3)}


def _boolean(rng: Random, depth: int) -> Schema:
    return {"type": rng.choice(["boolean", "null"])}


def nested(depth: int) -> Schema:
    schema: Schema = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    return schema


# name → schema; each must be refused, with a word of the reason, in bounded time
REFUSED: dict[str, tuple[Schema, str]] = {
    "type": ({"type": "strin"}, "strin"),
    "no schema": ({"properties": 3}, "properties"),
    "not": ({"type": "string", "not": {"const": "a"}}, "not"),
    "unique": ({"type": "array", "uniqueItems": True}, "uniqueItems"),
    "if": ({"if": {"type": "string"}, "then": {"maxLength": 3}}, "if"),
    "overlapping oneOf": ({"oneOf": [{"type": "integer"}, {"type": "number"}]}, "oneOf"),
    "lenient": ({"x-guidance": {"lenient": True}, "not": {}}, "not"),
    "property names": (
        {"type": "object", "propertyNames": {"pattern": "^a"}, "maxProperties": 2},
        "propertyNames",
    ),
    "empty range": ({"type": "integer", "minimum": 5, "maximum": 3}, "minimum"),
    "self": ({"$ref": "#"}, "nothing"),
    "loop": (
        {
            "$ref": "#/$defs/a",
            "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}},
        },
        "nothing",
    ),
    "remote": ({"$ref": "https://example.com/x.json"}, "example.com"),
    "lookahead": ({"type": "string", "pattern": "^(?=a)b$"}, "look-ahead"),
    "unclosed": ({"type": "string", "pattern": "("}, "unclosed"),
    "many stars": ({"type": "string", "pattern": "(.*a)?" * 2000}, "lexer"),
    "length": ({"type": "string", "maxLength": 10**30}, "maxLength"),
    "deep": (nested(80), "recursion"),
    "huge enum": ({"enum": [f"value {i}" for i in range(20_000)]}, "bytes"),
    "cross product": (
        {"allOf": [{"anyOf": [{"properties": {f"{i}": {"const": j}}} for j in range(9)]}
                   for i in range(9)]},
        "too large",
    ),
    "many patterns": (
        {"type": "string", "allOf": [{"pattern": f"^.*(a|b){{{i}}}.*$"} for i in range(1, 60)]},
        "compile",
    ),
    "remainders": (
        {"anyOf": [{"type": "integer", "multipleOf": m} for m in (997, 991, 983, 977)]},
        "compile",
    ),
    "patterns met later": (
        {"allOf": [{"type": "string", "pattern": f"^.*{c}.*$"} for c in "abcdefg"]},
        "expressions",
    ),
}  # fmt: skip
# of these, the ones that are an error only if the client asks for strictness
UNHELD = ("not", "unique", "if", "overlapping oneOf", "lookahead", "property names")
