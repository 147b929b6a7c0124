"""A client's JSON schema as the grammar's compiler takes it.

- Objects that list their `properties`, or patterns of their names, get no others, unless the
  schema says otherwise: a small model invents keys until `max_tokens`.
- Formats that the compiler does not know are annotations, as JSON Schema says.
- Numbers get the bounds that they lack: else they get exponents of thousands, which no program
  reads, and integers get digits until `max_tokens`.
- A `pattern` that no automaton can follow is left out, and so is a branch of an `anyOf` that has
  one where other branches do without. If it is a pattern of names, then other names may have its
  values.

The compiler itself leaves out further keywords of a schema that is not strict. Whatever fits a
prepared schema fits the original one, but for what was left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from urllib.parse import unquote

Json = dict[str, Any]
_KNOWN_FORMATS = frozenset(
    ("date-time", "time", "date", "duration", "email", "hostname", "ipv4", "ipv6", "uuid", "uri")
)
_HEX = "[0-9a-f]"
_UUID = f"{_HEX}{{8}}-{_HEX}{{4}}-%s{_HEX}{{3}}-[89ab]{_HEX}{{3}}-{_HEX}{{12}}"
_DAY = "(0[1-9]|1[0-2])-(0[1-9]|1[0-9]|2[0-8])|(0[13-9]|1[0-2])-(29|30)|(0[13578]|1[02])-31"
_FOURTH = "[2468][048]|[13579][26]"  # numbers that 4 divides, but for 00, 04 and 08
_LEAP_YEAR = f"([1-9][0-9](0[48]|{_FOURTH})|({_FOURTH})00)"
_DATE = f"([1-9][0-9]{{3}}-({_DAY})|{_LEAP_YEAR}-02-29)"
_HOURS = "([01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOURS}:[0-5][0-9](\\.[0-9]{{1,6}})?(Z|[+-]{_HOURS})"
_COUNT = "[0-9]{1,4}"
_CLOCK = f"T({_COUNT}H({_COUNT}M)?({_COUNT}S)?|{_COUNT}M({_COUNT}S)?|{_COUNT}S)"
_DAYS = f"({_COUNT}Y({_COUNT}M)?({_COUNT}D)?|{_COUNT}M({_COUNT}D)?|{_COUNT}D)"
# The compiler's own have the second 60 and numbers of any length, which no library reads.
_PATTERNS = {
    **{f"uuid{version}": _UUID % version for version in range(1, 9)},
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": f"P({_COUNT}W|{_DAYS}({_CLOCK})?|{_CLOCK})",
}
_MOST = 10**15  # of a number without bounds; below 2**53, up to which JavaScript counts exactly
_MOST_INTEGER = 9 * 10**18  # below 2**63: ids and times in nanoseconds have 18 or 19 digits
_BY_NAME = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems", "items")
_SINGLE = (
    "items",
    "additionalItems",
    "additionalProperties",
    "unevaluatedItems",
    "unevaluatedProperties",
    "propertyNames",
    "contains",
    "not",
    "if",
    "then",
    "else",
)
# these apply to the very value that their schema describes
_IN_PLACE_LISTS = ("allOf", "anyOf", "oneOf")
_IN_PLACE = ("not", "if", "then", "else")
_IN_PLACE_OTHERS = ("$ref", "$dynamicRef", "dependentSchemas")
_BESIDE_PATTERNS = (
    "additionalProperties",
    "unevaluatedProperties",
    "propertyNames",
    "required",
    "minProperties",
)
_OPENING = ("additionalProperties", "unevaluatedProperties", "patternProperties")


def prepare_schema(schema: Json, *, is_strict: bool) -> Json:
    """The schema to compile; the input is untouched. `is_strict`: no pattern may be left out."""
    prepared: Json = _prepare(schema, _open_schemas(schema), is_strict)
    return prepared


def _prepare(schema: Any, stays_open: set[int], is_strict: bool) -> Any:
    if not isinstance(schema, dict):
        return schema

    def child(value: Any) -> Any:
        return _prepare(value, stays_open, is_strict)

    prepared: Json = {}
    for name, value in schema.items():
        if name in _BY_NAME and isinstance(value, dict):
            prepared[name] = {key: child(member) for key, member in value.items()}
        elif name in _LISTS and isinstance(value, list):
            members = _held_branches(value) if name == "anyOf" else value
            prepared[name] = [child(member) for member in members]
        else:
            prepared[name] = child(value) if name in _SINGLE else value
    if id(schema) not in stays_open and _lists_all(schema):
        prepared["additionalProperties"] = False
    _replace_format(prepared)
    _bound_numbers(prepared)
    if not is_strict:
        _leave_out_patterns(prepared)
    return prepared


def _leave_out_patterns(schema: Json) -> None:
    if not _is_regular(schema.get("pattern")):
        del schema["pattern"]
    named = schema.get("patternProperties")
    if not isinstance(named, dict):
        return
    kept = {name: value for name, value in named.items() if _is_regular(name)}
    left_out = [value for name, value in named.items() if name not in kept]
    if not left_out:
        return
    schema["patternProperties"] = kept
    others = schema.get("additionalProperties", True)
    if others is not True:
        values = left_out if others is False else [others, *left_out]
        schema["additionalProperties"] = values[0] if len(values) == 1 else {"anyOf": values}


def _replace_format(schema: Json) -> None:
    name = schema.get("format")
    if not isinstance(name, str):
        return
    if name in _PATTERNS and "pattern" not in schema:
        schema["pattern"] = f"^{_PATTERNS[name]}$"
        del schema["format"]
    elif name not in _KNOWN_FORMATS:
        del schema["format"]


def _bound_numbers(schema: Json) -> None:
    """Give numbers the bounds that they lack; one that the schema has is kept."""
    types = schema.get("type")
    kinds = types if isinstance(types, list) else [types]
    most = _MOST if "number" in kinds else _MOST_INTEGER if "integer" in kinds else None
    if most is None or "enum" in schema or "const" in schema:
        return
    lower = [schema[name] for name in ("minimum", "exclusiveMinimum") if name in schema]
    upper = [schema[name] for name in ("maximum", "exclusiveMaximum") if name in schema]
    if not all(type(bound) in (int, float) for bound in lower + upper):
        return  # the compiler says what is wrong with it
    if not upper and all(bound < most for bound in lower):
        schema["maximum"] = most
    if not lower and all(bound > -most for bound in upper):
        schema["minimum"] = -most


def _held_branches(branches: list[Any]) -> list[Any]:
    """The branches without a pattern that cannot be held; all if there is no other branch."""
    held = [b for b in branches if not isinstance(b, dict) or _is_regular(b.get("pattern"))]
    return held or branches


def _is_regular(pattern: object) -> bool:
    r"""Does the pattern do without look-around (`\b` too) and references back to its groups?

    And without what the compiler reads otherwise than JSON Schema: `\0`, `\c`, `\<`, and a bracket
    or a backspace (`\b`) within a class.
    """
    if not isinstance(pattern, str):
        return True
    is_in_class = is_escaped = False
    for at, character in enumerate(pattern):
        if is_escaped:
            if character in "0123456789bBc" or (not is_in_class and character in "k<>"):
                return False
            is_escaped = False
        elif character == "\\":
            is_escaped = True
        elif is_in_class:
            if character == "[":
                return False
            is_in_class = character != "]"
        elif character == "[":
            is_in_class = True
        elif pattern.startswith(("(?=", "(?!", "(?<=", "(?<!"), at):
            return False
    return True


def _lists_all(schema: Json) -> bool:
    """Does the object say which properties it has, without a word about others?"""
    if "properties" not in schema and isinstance(schema.get("patternProperties"), dict):
        return not any(name in schema for name in _BESIDE_PATTERNS)
    properties = schema.get("properties")
    if not isinstance(properties, dict) or any(name in schema for name in _OPENING):
        return False
    required, fewest = schema.get("required", []), schema.get("minProperties", 0)
    if not isinstance(required, list) or not isinstance(fewest, (int, float)):
        return False
    return len(properties) >= fewest and all(
        isinstance(name, str) and name in properties for name in required
    )


def _open_schemas(root: Json) -> set[int]:
    """The ids of the schemas that another schema adds to, so that they must not be closed."""
    nodes = list(_subschemas(root))
    everything = {id(node) for node in nodes}
    if any("$id" in node for node in nodes[1:]):  # references within it are not from the root
        return everything
    found = {id(node) for node in nodes if _is_combined(node)}
    waiting = [node for node in nodes if id(node) in found]
    try:
        while waiting:
            for member in _in_place(waiting.pop(), root):
                if id(member) not in found:
                    found.add(id(member))
                    waiting.append(member)
    except LookupError:  # a reference leads elsewhere, which may be to any schema
        return everything
    return found


def _is_combined(schema: Json) -> bool:
    """Do several schemas say what properties this value has?"""
    sources = (*_IN_PLACE_LISTS, *_IN_PLACE, *_IN_PLACE_OTHERS)
    num_sources = sum(name in schema for name in sources)
    is_object = "properties" in schema or any(name in schema for name in _OPENING)
    return len(_items(schema.get("allOf"))) > 1 or num_sources + is_object > 1


def _in_place(schema: Json, root: Json) -> Iterator[Json]:
    """The schemas that apply to the same value. Raises `LookupError` for an unknown reference."""
    members: list[Any] = [schema.get(name) for name in _IN_PLACE]
    for name in _IN_PLACE_LISTS:
        members += _items(schema.get(name))
    members += _values(schema.get("dependentSchemas"))
    if isinstance(schema.get("$ref"), str):
        members.append(_resolve(root, schema["$ref"]))
    yield from (member for member in members if isinstance(member, dict))


def _subschemas(schema: Any) -> Iterator[Json]:
    """The schema and all within it."""
    if not isinstance(schema, dict):
        return
    yield schema
    for name, value in schema.items():
        if name in _BY_NAME:
            members = _values(value)
        elif name in _LISTS and isinstance(value, list):
            members = value
        else:
            members = [value] if name in _SINGLE else []
        for member in members:
            yield from _subschemas(member)


def _items(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _values(value: object) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else []


def _resolve(root: Json, reference: str) -> Any:
    """The schema that a reference within this document names. Raises `LookupError`."""
    if reference != "#" and not reference.startswith("#/"):
        raise LookupError(reference)
    node: Any = root
    for part in unquote(reference[1:]).split("/")[1:]:
        key = part.replace("~1", "/").replace("~0", "~")
        if isinstance(node, list) and key.isdecimal() and int(key) < len(node):
            node = node[int(key)]
        elif isinstance(node, dict):
            node = node[key]
        else:
            raise LookupError(reference)
    return node
