"""Bodies made to provoke: each gets a small 400, whatever it carries."""

from __future__ import annotations

from typing import Any

import pytest

from tests.fakes import CHAT, COMPLETIONS, Api

pytestmark = pytest.mark.anyio
LONG = "x" * 20_000
HOSTILE: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": [{}] * 5000}),
    (COMPLETIONS, {"prompt": ["a"] * 5000}),
    (CHAT, {"messages": [{}] * 5000}),
    (CHAT, {"messages": [{"role": LONG, "content": LONG}]}),
    (CHAT, {f"field{i}": i for i in range(5000)}),
    (CHAT, {LONG: 1}),
    (CHAT, {"messages": [{"role": "user", "content": "x", LONG: 1}]}),
    (CHAT, {"stop": [LONG] * 17}),
    (CHAT, {"temperature": LONG}),
    (CHAT, {"filter": LONG}),
    (CHAT, {"metadata": {LONG: 1}, "user": 3}),
]
ECHOING: list[tuple[str, dict[str, Any]]] = [
    (CHAT, {"filter": {"keep": LONG}}),
    (CHAT, {"filter": {"keep": [{}] * 5000}}),
    (CHAT, {"filter": {"keep": 10**4000}}),
    (CHAT, {"filter": {"layer": 10**4000}}),
    (CHAT, {"logit_bias": {LONG: "x"}}),
    (CHAT, {"max_tokens": 10**4000}),
    (COMPLETIONS, {"prompt": [10**4000]}),
]
CASES = [*HOSTILE, *ECHOING]


@pytest.mark.parametrize(("path", "fields"), CASES, ids=lambda v: str(v)[:40])
async def test_a_hostile_body_gets_a_small_reply(
    api: Api, path: str, fields: dict[str, Any]
) -> None:
    reply = await api.post(path, **fields)
    assert reply.status_code == 400
    assert len(reply.content) < 2048
    await api.assert_alive()
