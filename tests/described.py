"""Replies held to the server's own OpenAPI document."""

from __future__ import annotations

import json
from typing import Any

import httpx
from jsonschema import Draft202012Validator

Json = dict[str, Any]


class Described:
    """A document. The schemas of streams are those of one event and of its data, or of a line."""

    def __init__(self, document: Json) -> None:
        self.document = document

    def operation(self, method: str, path: str) -> Json:
        found: Json = self.document["paths"][path][method.lower()]
        return found

    def accepts(self, path: str, body: object) -> bool:
        content = self.operation("POST", path)["requestBody"]["content"]
        return self._validator(content["application/json"]["schema"]).is_valid(body)

    def check(self, reply: httpx.Response, path: str | None = None) -> None:
        """Status, headers and body. `path`: as the document has it, if not the request's."""
        described = self.operation(reply.request.method, path or reply.request.url.path)
        said = described["responses"][str(reply.status_code)]
        for name, header in said["headers"].items():
            value: Any = reply.headers.get(name)
            if value is None:
                assert not header["required"], name
                continue
            if header["schema"].get("type") == "integer":
                value = int(value)
            self._validator(header["schema"]).validate(value)
        kind = reply.headers["content-type"].split(";")[0]
        schema = said["content"][kind]["schema"]
        if kind == "text/event-stream":
            for event in events_of(reply.text):
                self._check_event(event, schema)
        elif kind == "application/x-ndjson":
            for line in reply.text.splitlines():
                self._validator(schema).validate(json.loads(line))
        else:
            content = reply.json() if kind == "application/json" else reply.text
            self._validator(schema).validate(content)

    def _check_event(self, event: Json, schema: Json) -> None:
        self._validator(schema).validate(event)
        data = schema["properties"]["data"]
        *_, coded = data.get("anyOf", [data])
        if event["data"] != "[DONE]":
            self._validator(coded["contentSchema"]).validate(json.loads(event["data"]))
        else:
            assert {"const": "[DONE]"} in data["anyOf"]

    def _validator(self, schema: Json) -> Draft202012Validator:
        whole = {**schema, "components": self.document["components"]}
        return Draft202012Validator(whole)


def events_of(text: str) -> list[Json]:
    """The events of a stream, by field; without comments."""
    blocks = [
        [line for line in block.split("\n") if line and not line.startswith(":")]
        for block in text.split("\n\n")
    ]
    return [dict(line.split(": ", 1) for line in block) for block in blocks if block]
