"""Limits of counts, lengths and texts hold in the other protocols, too."""

from __future__ import annotations

from typing import Any

import pytest

from tests.anthropic_requests import COUNT, MESSAGES, USER
from tests.fakes import Api
from tests.openai_responses_requests import RESPONSES
from tests.refusals import check_count, check_longest_stop, check_often_named_document

pytestmark = pytest.mark.anyio


async def test_a_stop_string_has_a_longest_length(api: Api) -> None:
    stops = {"stop_sequences": ["y", "x" * 1001]}
    body = {"model": "fake", "messages": [USER], "max_tokens": 9, **stops}
    await check_longest_stop(api, MESSAGES, body, "stop_sequences.1")


@pytest.mark.parametrize(
    ("path", "fields", "message"),
    [
        (
            MESSAGES,
            {"messages": [USER] * 10_001, "max_tokens": 9},
            "messages: has 10001 messages, the limit is",
        ),
        (RESPONSES, {"input": [USER] * 10_001}, "input: has 10001 messages, the limit is 10000"),
    ],
    ids=lambda value: str(value)[:30],
)
async def test_too_many_of_something_is_refused_by_its_count(
    api: Api, path: str, fields: dict[str, Any], message: str
) -> None:
    await check_count(api, path, {"model": "fake", **fields}, message)


async def test_a_document_that_is_named_often_is_not_tokenized(api: Api) -> None:
    def block(document_id: str) -> dict[str, Any]:
        return {"type": "document", "source": {"type": "file", "file_id": document_id}}

    await check_often_named_document(api, COUNT, block)
