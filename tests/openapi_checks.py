"""What the OpenAPI document says of endpoints, held to what they do.

`tests/api` has the core's endpoints checked, and the tests of a wing the wing's.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from gemserve.contract.events import Finished
from tests.described import Described
from tests.fakes import COMPLETIONS, FILTERED, Api, FakeCore, api_over, replace_file

Bodies = Mapping[str, dict[str, Any]]
SELECTION = "/v1/filter"
UNKNOWN = "doc-" + "0" * 32
SAID = {"role": "user", "content": "Hi"}
BOOM = MemoryError("boom")


async def described(api: Api, **headers: str) -> Described:
    return Described((await api.client.get("/openapi.json", headers=headers)).json())


async def check_keys(
    tokenizer: Any,
    folder: Path,
    bodies: Bodies,
    *,
    is_open: Collection[str] = (),
    needs_key: Collection[str] = (),
) -> None:
    """Keys and quotas of what takes `bodies`, and of what is only read, without a key or with one.

    `folder`: for the file of keys.
    """
    keys = replace_file(folder / "keys", "sk-a")
    key = {"Authorization": "Bearer sk-a"}
    async with api_over(
        FakeCore(), tokenizer, api_key_file=keys, requests_per_minute=len(bodies)
    ) as api:
        document = await described(api, **key)
        for path in is_open:
            assert "security" not in document.operation("GET", path)
            document.check(await api.client.get(path))
        for path in needs_key:
            assert document.operation("GET", path)["security"]
            document.check(await api.client.get(path))
        for status in (401, 200, 429):
            for path, body in bodies.items():
                headers = {} if status == 401 else key
                reply = await api.client.post(path, json=body, headers=headers)
                assert reply.status_code == status
                document.check(reply)


async def check_errors(tokenizer: Any, path: str, body: dict[str, Any]) -> None:
    async with api_over(FakeCore(), tokenizer, max_body_bytes=1000) as api:
        document = await described(api)
        for status, content in (
            (400, b"{"),
            (400, b'{"model": 3}'),
            (404, json.dumps({**body, "model": "other"}).encode()),
            (413, b" " * 1001),
        ):
            reply = await api.client.post(path, content=content)
            assert reply.status_code == status
            document.check(reply)
            if status == 400:
                assert not document.accepts(path, {"model": 3})


async def check_failures(api: Api, path: str, body: dict[str, Any]) -> None:
    document = await described(api)
    aborted = Finished(reason="abort", completion_tokens=0)
    for script, status in (((BOOM,), 500), ((FILTERED, aborted), 503)):
        api.core.script = script
        reply = await api.client.post(path, json=body)
        if path != SELECTION or script == (BOOM,):
            assert reply.status_code == status
        document.check(reply)


async def check_failures_in_streams(api: Api, path: str, body: dict[str, Any]) -> None:
    document = await described(api)
    for script, status in (((BOOM,), 500), ((1.2, BOOM), 200), ((FILTERED, "a", BOOM), 200)):
        api.core.script = script
        reply = await api.client.post(path, json={**body, "stream": True})
        assert reply.status_code == status
        assert "boom" in reply.text
        document.check(reply)


async def check_full_queue_and_dead_engine(tokenizer: Any, bodies: Bodies) -> None:
    async with api_over(FakeCore(), tokenizer, max_queue=0) as api:
        document = await described(api)
        for path, body in bodies.items():
            reply = await api.client.post(path, json=body)
            assert (reply.status_code, "retry-after" in reply.headers) == (503, True)
            document.check(reply)
    async with api_over(FakeCore(SystemExit("device lost")), tokenizer) as api:
        await api.post(COMPLETIONS)
        for path, body in bodies.items():
            reply = await api.client.post(path, json=body)
            assert reply.status_code == 503
            document.check(reply)
        for path in ("/health", "/ready"):
            reply = await api.client.get(path)
            assert reply.json()["status"] == "dead"
            document.check(reply)


async def check_unknown_document(api: Api, path: str, body: dict[str, Any]) -> None:
    """`body`: it names the document UNKNOWN."""
    document = await described(api)
    assert document.accepts(path, body)
    reply = await api.client.post(path, json=body)
    assert reply.status_code == 404
    assert f"={UNKNOWN!r}: no such document" in reply.json()["error"]["message"]
    document.check(reply)


async def check_integers(api: Api, path: str, good: dict[str, Any]) -> None:
    """Each may be written with a point, as JSON schema has it; pydantic's strict ones refuse it."""
    document = await described(api)
    content = document.operation("POST", path)["requestBody"]["content"]["application/json"]
    body = document.document["components"]["schemas"][content["schema"]["$ref"].split("/")[-1]]
    integers = {
        field: float(kind.get("minimum", 0) or kind.get("maximum", 0))
        for form in body.get("anyOf", [body])
        for field, schema in form["properties"].items()
        for kind in schema.get("anyOf", [schema])
        if kind.get("type") == "integer"
    }
    assert integers
    for field, value in integers.items():
        reply = await api.client.post(path, json={**good, field: value})
        assert "valid integer" not in reply.text, field


async def check_body(api: Api, path: str, body: dict[str, Any], is_good: bool) -> None:
    """The schema and the server accept `body`, or neither does."""
    api.core.script = (FILTERED,)
    reply = await api.client.post(path, json=body)
    assert reply.status_code == (200 if is_good else 400), reply.text
    assert (await described(api)).accepts(path, body) == is_good
