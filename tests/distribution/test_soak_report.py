"""The soak's verdicts: a leak, or a stream that differs from the whole answer, must show."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.robustness import answers, soak_report
from tests.fakes import CHAT, COMPLETIONS, FakeCore, api_over

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Hello", "n": 2, "stream_options": {"include_usage": True}},
    CHAT: {
        "messages": [{"role": "user", "content": "Hello"}],
        "stream_options": {"include_usage": True},
    },
    RESPONSES: {"input": "Hello"},
    MESSAGES: {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 9},
}


def samples(sizes: list[float]) -> list[dict[str, float]]:
    return [{"at_s": 60.0 * i, "rss_bytes": 1e9 * size} for i, size in enumerate(sizes)]


def test_memory_that_grows_is_not_flat() -> None:
    trend = soak_report.memory_trend
    warm_up = [0.5, 0.6, 0.7, 0.8, 0.9]
    noisy = [1.0 + 0.01 * (i % 3) for i in range(15)]
    flat = trend(samples(warm_up + noisy))
    assert flat["is_flat"]
    assert flat["range"] == pytest.approx(0.02, rel=0.05)
    growing = trend(samples(warm_up + [1.0 + 0.002 * i for i in range(15)]))
    assert not growing["is_flat"]
    assert growing["bytes_per_hour"] == pytest.approx(0.12e9)


def test_what_an_idle_server_keeps_is_named() -> None:
    before = dict.fromkeys(soak_report.LEFT_BEHIND, 3)
    assert soak_report.left_behind(before, before | {"threads": 2}) == {}
    assert soak_report.left_behind(before, before | {"tasks": 4}) == {"tasks": [3, 4]}


def test_percentiles_are_values_that_were_measured() -> None:
    percentile = soak_report.percentile
    assert [percentile([3.0, 1.0, 2.0, 4.0], p) for p in (0, 50, 99, 100)] == [1.0, 2.0, 4.0, 4.0]
    assert percentile([], 50) is None


@pytest.mark.anyio
@pytest.mark.parametrize("path", BODIES)
async def test_a_stream_is_compared_as_the_whole_answer(tokenizer: Any, path: str) -> None:
    async with api_over(FakeCore(), tokenizer) as api:
        body = {"model": "fake", **BODIES[path]}
        streamed = answers.StreamedAnswer(path)
        reply = await api.client.post(path, json=body | {"stream": True})
        for line in reply.text.splitlines():
            if line.startswith("data: "):
                streamed.see(line.removeprefix("data: "))
        body.pop("stream_options", None)
        whole = answers.answer_of(path, (await api.client.post(path, json=body)).json())
    assert streamed.is_ended
    assert answers.difference([whole], streamed.answer()) is None
    assert "Héllo 🌍!" in str(whole)
    whole["finish"] = "other"
    assert "other" in answers.difference([whole], streamed.answer())
