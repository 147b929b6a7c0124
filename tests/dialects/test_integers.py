"""Every integer of a request has bounds, which the document states and a refusal names."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.fakes import Api

pytestmark = pytest.mark.anyio
Json = dict[str, Any]
HUGE = [10**30, -(10**30), 10**400, 1e300]
USER = {"role": "user", "content": "Hi"}
RERANKS, SCORES = ("/v1/rerank", "/rerank", "/v2/rerank"), ("/v1/score", "/score")
BODIES: dict[str, Json] = {
    "/v1/completions": {"prompt": "Hi"},
    "/v1/chat/completions": {"messages": [USER]},
    "/v1/responses": {"input": "Hi"},
    "/v1/responses/input_tokens": {"input": "Hi"},
    "/v1/messages": {"messages": [USER], "max_tokens": 9},
    "/v1/messages/count_tokens": {"messages": [USER]},
    "/v1/filter": {"prompt": "Hi"},
    **{path: {"query": "Hi", "documents": ["Ho"]} for path in RERANKS},
    **{path: {"text_1": "Hi", "text_2": "Ho"} for path in SCORES},
    "/api/chat": {"messages": [USER]},
    "/api/generate": {"prompt": "Hi"},
    "/v1/documents": {"text": "Hi"},
    "/tokenize": {"prompt": "Hi"},
    "/detokenize": {"tokens": [50]},
}


def integers(
    schema: Any, document: Json, path: tuple[str, ...] = (), seen: frozenset[str] = frozenset()
) -> Iterator[tuple[tuple[str, ...], Json]]:
    """The path and the schema of every integer; an item of a list has the name []."""
    if isinstance(schema, list):
        for member in schema:
            yield from integers(member, document, path, seen)
    if not isinstance(schema, dict):
        return
    name = schema.get("$ref", "").rpartition("/")[2]
    if name and name not in seen:
        yield from integers(document["components"]["schemas"][name], document, path, seen | {name})
    if schema.get("type") in ("integer", "number"):
        yield path, schema
    for field, member in schema.get("properties", {}).items():
        yield from integers(member, document, (*path, field), seen)
    for key in ("anyOf", "oneOf", "allOf"):
        yield from integers(schema.get(key), document, path, seen)
    yield from integers(schema.get("items"), document, (*path, "[]"), seen)


def value_at(path: tuple[str, ...], value: object) -> object:
    """A JSON value that has `value` at this path."""
    for name in reversed(path):
        value = [value] if name == "[]" else {name: value}
    return value


async def test_every_integer_has_bounds_and_keeps_them(api: Api) -> None:
    document = (await api.client.get("/openapi.json")).json()
    num_sent = 0
    for path, operations in document["paths"].items():
        content = operations.get("post", {}).get("requestBody", {}).get("content", {})
        if "application/json" not in content or path not in BODIES:
            assert not list(integers(content.get("application/json", {}).get("schema"), document))
            continue
        for place, schema in integers(content["application/json"]["schema"], document):
            if not {"enum", "const"} & set(schema):
                assert {"minimum", "exclusiveMinimum"} & set(schema), (path, place)
                assert {"maximum", "exclusiveMaximum"} & set(schema), (path, place)
            for huge in HUGE:
                body = {"model": "fake", **BODIES[path]}
                field = place[0]
                body[field] = value_at(place[1:], huge)
                reply = await api.client.post(path, json=body)
                assert reply.status_code == 400, (path, place, huge, reply.text)
                error = reply.json()["error"]
                message = error if path.startswith("/api/") else error["message"]
                assert message.split("=")[0].split(":")[0].startswith(field), error
                num_sent += 1
    assert num_sent > 300
    await api.assert_alive()


@pytest.mark.parametrize("value", ["9" * 5000, "-1", "1e30", str(10**30)])
async def test_integers_of_a_form_have_bounds(api: Api, value: str) -> None:
    for field in ("ttl", "expires_after[seconds]"):
        form = {field: value, "expires_after[anchor]": "created_at"}
        reply = await api.client.post("/v1/documents", data=form, files={"file": ("a.txt", b"Hi")})
        assert reply.status_code == 400, reply.text
        assert len(reply.content) < 2048
