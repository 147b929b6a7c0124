"""The pages of endpoints and their objects, from the OpenAPI document of a server."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from website.reference.example_server import example_server
from website.reference.markdown import NOTE, code, prose, table

Json = dict[str, Any]
INTRODUCTION = """\
# Endpoints

Every endpoint, from the OpenAPI document of this release; a server has it at `/openapi.json`.
[The HTTP interface](../http.md) explains them. All objects are on
[a page of their own](objects.md). All replies have the header `X-Request-Id`. What a server with
API keys needs one for is in [the HTTP interface](../http.md#keys-and-limits).
"""
OBJECTS = """\
# Objects of requests and replies

The objects of the OpenAPI document of this release. [Endpoints](endpoints.md) says where each is
used.
"""
SHOWN_CHARS = 60  # of a default or an example


def document() -> Json:
    return example_server()[1].openapi()


def write_page() -> str:
    lines = [NOTE, "", INTRODUCTION]
    found = document()
    rows = [
        (f"[{method.upper()} `{path}`](#{anchor(method, path)})", prose(operation["summary"]))
        for path, operations in found["paths"].items()
        for method, operation in operations.items()
    ]
    lines += [*table(("endpoint", "what it does"), rows), ""]
    for path, operations in found["paths"].items():
        for method, operation in operations.items():
            lines += endpoint(method, path, operation, found)
    return "\n".join(lines)


def anchor(method: str, path: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", f"{method}{path}".lower()).strip("-")


def endpoint(method: str, path: str, operation: Json, found: Json) -> Iterator[str]:
    yield from (f"## {method.upper()} `{path}` {{#{anchor(method, path)}}}", "")
    yield from (f"{prose(operation['summary'])}.", "")
    if text := operation.get("description"):
        yield from (prose(text), "")
    parameters = [
        (code(p["name"]), p["in"], kind(p["schema"]), prose(p.get("description", "")))
        for p in operation.get("parameters", ())
        if p["name"] != "X-Request-Id"
    ]
    if parameters:
        yield from (*table(("parameter", "in", "type", "meaning"), parameters), "")
    for media, content in operation.get("requestBody", {}).get("content", {}).items():
        schema = content["schema"]
        yield from (f"Body, `{media}`: {kind(schema)}", "")
        yield from fields(resolve(schema, found))
        if example := content.get("example"):
            yield from ("```json", json.dumps(example, indent=2, ensure_ascii=False), "```", "")
    rows = []
    for status, reply in operation["responses"].items():
        kinds = [f"`{m}`: {kind(c['schema'])}" for m, c in reply.get("content", {}).items()]
        rows.append((status, prose(reply.get("description", "")), "; ".join(kinds)))
    yield from (*table(("status", "meaning", "reply"), rows), "")


def write_objects() -> str:
    found = document()
    lines = [NOTE, "", OBJECTS]
    for name, schema in sorted(found["components"]["schemas"].items(), key=lambda s: title(s[0])):
        lines += [f"## {title(name)} {{#{name.lower()}}}", ""]
        if text := schema.get("description"):
            lines += [prose(text), ""]
        body = list(fields(schema))
        lines += body or [kind(schema), ""]
    return "\n".join(lines)


def title(name: str) -> str:
    """A name that several modules use comes with its module."""
    *modules, last = name.split("__")
    return f"{last} ({' '.join(modules[-2:]).replace('_', ' ')})" if modules else last


def resolve(schema: Json, found: Json) -> Json:
    reference = schema.get("$ref")
    return found["components"]["schemas"][reference.rsplit("/", 1)[-1]] if reference else schema


def fields(schema: Json) -> list[str]:
    """The table of an object's fields."""
    properties = schema.get("properties")
    if not properties:
        return []
    required = schema.get("required", ())
    rows = [
        (
            code(name),
            kind(one),
            "required" if name in required else default_of(one),
            prose(one.get("description", "")),
        )
        for name, one in sorted(properties.items(), key=lambda p: p[0] not in required)
    ]
    return [*table(("field", "type", "default", "meaning"), rows), ""]


def default_of(schema: Json) -> str:
    if "default" not in schema:
        return ""
    text = json.dumps(schema["default"], ensure_ascii=False)
    return code(text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}…")


def kind(schema: Json) -> str:
    """A schema in a few words, with links to objects."""
    if reference := schema.get("$ref"):
        name = reference.rsplit("/", 1)[-1]
        return f"[{title(name)}](objects.md#{name.lower()})"
    for word in ("anyOf", "oneOf"):
        if word in schema:
            kinds = dict.fromkeys(kind(part) for part in schema[word])
            return " or ".join(kinds)
    if "allOf" in schema:
        return " and ".join(kind(part) for part in schema["allOf"])
    if "const" in schema:
        return code(json.dumps(schema["const"], ensure_ascii=False))
    if "enum" in schema:
        return " or ".join(code(json.dumps(value, ensure_ascii=False)) for value in schema["enum"])
    said = schema.get("type", "anything")
    if said == "array":
        return f"list of {kind(schema['items'])}" if "items" in schema else "list"
    if isinstance(said, list):
        return " or ".join(said)
    return f"{said}{limits(schema)}"


def limits(schema: Json) -> str:
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if low is not None and high is not None:
        return f" ({low} to {high})"
    if low is not None:
        return f" (at least {low})" if "minimum" in schema else f" (above {low})"
    if high is not None:
        return f" (at most {high})"
    if "maxLength" in schema:
        return f" (at most {schema['maxLength']} characters)"
    return ""
