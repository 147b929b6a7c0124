"""Parse the bytes of a request body; the error says which field is wrong, and how."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Collection, Iterator
from typing import Any, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, from_json

from gemserve.api.documents.finder import Finder
from gemserve.api.requests.base_bodies import MAX_CHOICES, NO_TEXT, Body
from gemserve.api.requests.document_reference import NOT_FOUND
from gemserve.api.requests.served_types import WRONG_TYPE
from gemserve.errors import DocumentNotFound, RequestError, shown

BodyT = TypeVar("BodyT", bound=Body)
# Fields that OpenAI's API has, and of which this server serves no value but null.
UNSUPPORTED = (
    "suffix",
    "previous_response_id",
    "conversation",
    "audio",
    "functions",
    "web_search_options",
)
# what other servers' fields are called here
_HERE = {
    "specprefill": "filter.reader",  # these two are for prompts that a small model reads first
    "specprefill_keep_pct": "filter.keep, a share or a count",
    "enable_thinking": "chat_template_kwargs.enable_thinking",
    "max_new_tokens": "max_tokens",
    "reasoning": "reasoning_effort",
}
_MAX_PATH_CHARS = 200
# of an endpoint that takes texts only, token ids too, and lists of both
_PROMPTS = (
    "must be a text",
    "must be a text or token ids",
    f"must be a text, token ids, or a list of up to {MAX_CHOICES} of either",
)
# what may stand in place of a text, by pydantic's type of the error
_KINDS = {"list_type": "a list", "dict_type": "an object", "model_type": "an object"}
_BEGINNING = "Input should be "
MAX_MESSAGES = 10_000
MAX_PARTS = 20_000  # of all messages: parts of their contents, and calls
MAX_DOCUMENTS = 1000  # that are ranked for one query, or pairs that are scored
TEXT_LISTS = ("documents", "items", "queries", "text_1", "text_2", "data_1", "data_2")
_LISTS = ("content", "tool_calls", "output")
# an escape of JSON; `half`: of a surrogate that has no other half, or such a one in UTF-8
_ESCAPE = re.compile(
    rb"\\u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}"
    rb"|(?P<half>\\u[dD][89a-fA-F][0-9a-fA-F]{2}|\xed[\xa0-\xbf][\x80-\xbf])|\\."
)


def parse_body(raw: bytes, body_type: type[BodyT], finder: Finder | None = None) -> BodyT:
    """The body as its type. Takes long for a long body. Raises `RequestError`.

    `finder` finds the documents that the body names; without it there are none.
    """
    try:
        content = _from_json(raw)
    except ValueError as error:
        raise RequestError(
            f"the body is not valid JSON: {error}", param=None, code="invalid_json"
        ) from error
    if not isinstance(content, dict):
        raise RequestError("the body must be a JSON object", param=None, code="invalid_json")
    return validate_body(content, body_type, finder)


def _from_json(raw: bytes) -> Any:
    """The parsed JSON. Half of a surrogate pair, as cut texts have it, becomes U+FFFD."""
    raw = raw.removeprefix(BOM_UTF8)
    try:
        return from_json(raw)
    except ValueError:
        mended = _ESCAPE.sub(_whole_character, raw)
        if mended == raw:
            raise
        return from_json(mended)


def _whole_character(escape: re.Match[bytes]) -> bytes:
    return b"\\ufffd" if escape["half"] else escape[0]


def validate_body(
    content: dict[str, Any], body_type: type[BodyT], finder: Finder | None = None
) -> BodyT:
    """Parsed JSON as its type. Raises `RequestError`."""
    for name in content:  # checked first: validation would collect an error for every field
        if name not in body_type.model_fields:
            raise _unknown_field(name, body_type.model_fields)
    _check_counts(content)
    try:
        return body_type.model_validate(content, context=finder)
    except ValidationError as error:
        raise _validation_error(error, content) from error


def _check_counts(body: dict[str, Any]) -> None:
    """Raise `RequestError` for a body with too many of something. Checking each would take long."""
    for field in ("messages", "input"):
        messages = body.get(field)
        if not isinstance(messages, list):
            continue
        _check_count(field, len(messages), "messages", MAX_MESSAGES)
        _check_count(field, sum(map(len, _lists_in(messages))), "parts", MAX_PARTS)
    for field in TEXT_LISTS:
        texts = body.get(field)
        if isinstance(texts, list):
            _check_count(field, len(texts), "texts", MAX_DOCUMENTS)
    prompts = body.get("prompt")
    if isinstance(prompts, list) and isinstance(next(iter(prompts), None), str | list):
        _check_count("prompt", len(prompts), "prompts", MAX_CHOICES)


def _lists_in(items: list[Any]) -> Iterator[list[Any]]:
    """The lists of parts in these messages or parts."""
    for item in items:
        for name in _LISTS if isinstance(item, dict) else ():
            parts = item.get(name)
            if isinstance(parts, list):
                yield parts
                yield from _lists_in(parts)


def _check_count(field: str, count: int, kind: str, limit: int) -> None:
    if count > limit:
        raise RequestError(f"{field}: has {count} {kind}, the limit is {limit}", param=field)


def _validation_error(error: ValidationError, body: object) -> RequestError:
    """Pydantic's first complaint about `body`: names the field, its value and the limit."""
    first, *others = error.errors(include_url=False)
    path = _path_of(first, body)
    if first["type"] == "extra_forbidden":
        return _unknown_field(path or "")
    if first["type"] == NOT_FOUND:
        return DocumentNotFound(first["input"], param=path or "")
    if first["type"] == "missing":
        return RequestError(f"{path}: required", param=path, code="missing_field")
    if path is not None and (field := path.split(".")[0]) in UNSUPPORTED:
        instead = "; use tools" if field == "functions" else ""
        return RequestError(f"{path}={shown(first['input'])}: not supported{instead}", param=path)
    if first["type"] == WRONG_TYPE:
        return _wrong_type(path, first)
    message = _message(first)
    if path == "prompt" and first["type"] == "string_type":  # what else it may be is not said
        message = _PROMPTS[min(2, len({other["loc"] for other in others}))]
    elif others:  # of a union whose members do not say which they are
        beside = (_message(other) for other in others if _path_of(other, body) == path)
        message = ", or ".join(
            dict.fromkeys([message, *(each.removeprefix(_BEGINNING) for each in beside)])
        )
    given = "null" if first["input"] is None else shown(first["input"])
    return RequestError(f"{path}={given}: {message}", param=path)


def _message(error: ErrorDetails) -> str:
    """What the value should be."""
    kind = error["type"]
    if kind in _KINDS and error["loc"][-1:] == (NO_TEXT,):
        return f"must be a text or {_KINDS[kind]}"
    return re.sub(r" or instance of \w+$", "", error["msg"].removeprefix("Value error, "))


def _wrong_type(path: str | None, error: ErrorDetails) -> RequestError:
    """The error for an object without a type, or with one that is not served."""
    field, given = f"{path}.type", error["input"].get("type")
    if given is None:
        message = f"{field}: required; {error['msg']}"
        return RequestError(message, param=field, code="missing_field")
    return RequestError(f"{field}={shown(given)}: {error['msg']}", param=field)


def _unknown_field(name: str, known: Collection[str] = ()) -> RequestError:
    name, instead = name[:_MAX_PATH_CHARS], _HERE.get(name)
    is_here = instead is not None and re.split("[.,]", instead)[0] in known
    here = f"; here it is {instead}" if is_here else ""
    return RequestError(f"{name}: unknown field{here}", param=name, code="unknown_field")


def _path_of(error: ErrorDetails, body: object) -> str | None:
    """The field's path; pydantic's location also names the members of unions that were tried."""
    location, is_missing = error["loc"], error["type"] == "missing"
    parts: list[str] = []
    for place, part in enumerate(location):
        is_index = isinstance(part, int) and isinstance(body, list) and part < len(body)
        if is_index or (isinstance(body, dict) and part in body):
            members: Any = body
            body = members[part]
            parts.append(str(part))
        elif is_missing and place == len(location) - 1:
            parts.append(str(part))
    return ".".join(parts)[:_MAX_PATH_CHARS] or None
