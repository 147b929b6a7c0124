"""`return_attention` in replies and streams, and where there is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gemserve.contract.events import Finished
from gemserve.contract.scores import AnswerAttention
from tests.fakes import CHAT, COMPLETIONS, FILTERED, Api, FakeCore, data_of

pytestmark = pytest.mark.anyio
FOUND = AnswerAttention(
    heads=((2, 1),), passages=((0, 4), (9, 12)), offsets=(0, 1), tokens=(((1, 0.5),), ((0, 0.25),))
)
SHOWN = {
    "heads": [[2, 1]],
    "passages": [[0, 4], [9, 12]],
    "offsets": [0, 1],
    "tokens": [[[1, 0.5]], [[0, 0.25]]],
}
ASKED: dict[str, Any] = {"filter": {"return_attention": True}}


class Watching(FakeCore):
    """Its answers come with what they attended to, if the request asks for it."""

    def step(self) -> Any:
        return [(job, self._found(event)) for job, event in super().step()]

    def _found(self, event: Any) -> Any:
        if isinstance(event, Finished) and self.requests[-1].filter.return_attention:
            return replace(event, attention=FOUND)
        return event


@pytest.fixture
def core() -> FakeCore:
    return Watching(FILTERED, "a", "b")


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_choice_has_it_if_it_is_asked_for(api: Api, path: str) -> None:
    (choice,) = (await api.post(path, **ASKED)).json()["choices"]
    assert choice["attention"] == SHOWN
    (choice,) = (await api.post(path)).json()["choices"]
    assert "attention" not in choice


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
async def test_a_stream_s_last_part_has_it(api: Api, path: str) -> None:
    chunks = data_of(await api.post(path, stream=True, **ASKED))
    parts = [part for chunk in chunks for part in chunk["choices"]]
    assert parts[-1]["attention"] == SHOWN
    assert not [part for part in parts[:-1] if "attention" in part]


async def test_a_selection_does_not_know_it(api: Api) -> None:
    """It has no place for it: silence would look like an answer that attended to nothing."""
    reply = await api.client.post("/v1/filter", json={"model": "fake", "prompt": "Hi", **ASKED})
    assert reply.status_code == 400
    assert "return_attention" in reply.text
