"""How other servers' streams failed their clients: each case over a socket."""

from __future__ import annotations

import json
import threading
from typing import Any, NoReturn

import pytest
import torch

from gemserve.engine.core import Core
from tests.fakes import CHAT, COMPLETIONS, FILTERED, FakeCore, data_of, serving_over, text_of
from tests.served import Served, served

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
USER = [{"role": "user", "content": "Say it."}]
BODIES: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "Say it."},
    CHAT: {"messages": USER},
    RESPONSES: {"input": "Say it."},
    MESSAGES: {"messages": USER, "max_tokens": 9},
}
FILLERS = {
    COMPLETIONS: b'"text": ""',
    CHAT: b'"delta": {}',
    RESPONSES: b"event: response.in_progress",
    MESSAGES: b"event: ping",
}
UNKNOWN = "\N{REPLACEMENT CHARACTER}"


def saying(text: str, **fields: Any) -> dict[str, Any]:
    """A chat whose answer can only be this text, in quotation marks."""
    schema = {"name": "said", "schema": {"enum": [text]}}
    form = {"type": "json_schema", "json_schema": schema}
    return {"messages": USER, "temperature": 0, "response_format": form, **fields}


def streamed_and_whole(builtin: Served, body: dict[str, Any]) -> tuple[list[str], dict[str, Any]]:
    """The texts of a stream's chunks, and the whole reply's choice."""
    whole = builtin.ask(CHAT, **body)
    chunks = data_of(builtin.post(CHAT, **body, stream=True))
    texts = [text_of([chunk]) for chunk in chunks]
    assert "".join(texts) == text_of([whole])
    return texts, whole["choices"][0]


@pytest.mark.parametrize("path", BODIES)
def test_a_long_silence_is_filled(tokenizer: Any, path: str) -> None:
    """Proxies closed streams whose prompt took longer to read than they wait."""
    gate = threading.Event()
    core = FakeCore(gate, FILTERED, "fine")
    with (
        served(serving_over(core, tokenizer, keep_alive_s=0.02)) as server,
        server.send(path, **BODIES[path], stream=True) as connection,
    ):
        seen = b""
        filler = FILLERS[path]
        while seen.count(filler) < 3:
            part = connection.recv(65536)
            assert part, seen
            seen += part
        assert b"fine" not in seen
        gate.set()
        while b"fine" not in seen:
            part = connection.recv(65536)
            assert part, seen
            seen += part


@pytest.mark.parametrize("script", [(MemoryError("boom"),), (FILTERED, MemoryError("boom"))])
@pytest.mark.parametrize("path", BODIES)
def test_a_failure_before_the_first_token_is_an_error(
    tokenizer: Any, path: str, script: tuple[Any, ...]
) -> None:
    """Clients got a stream of nothing but its end."""
    with served(serving_over(FakeCore(*script), tokenizer)) as server:
        whole = server.post(path, **BODIES[path])
        assert whole.status_code == 500
        assert "boom" in whole.json()["error"]["message"]
        streamed = server.post(path, **BODIES[path], stream=True)
    text = streamed.text
    assert text.count("boom") == 1
    assert streamed.status_code == (200 if script[0] is FILTERED else 500)
    if streamed.status_code == 500:
        assert "boom" in streamed.json()["error"]["message"]
    elif path in (COMPLETIONS, CHAT):
        assert text.index("boom") < text.index("data: [DONE]")
        assert text.count("[DONE]") == 1
        assert text.endswith("data: [DONE]\n\n")
    else:
        failure = "event: response.failed" if path == RESPONSES else "event: error"
        assert text.count(failure) == 1


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
@pytest.mark.parametrize("n", [0, -1, 129])
def test_a_number_of_choices_that_cannot_be_is_a_400(
    builtin: Served, path: str, stream: bool, n: int
) -> None:
    """`n: 0` gave an empty stream, and killed the engine."""
    reply = builtin.post(path, **BODIES[path], n=n, stream=stream)
    assert reply.status_code == 400
    error = reply.json()["error"]
    assert error["param"] == "n"
    assert ("128" if n > 128 else "1") in error["message"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_every_stream_has_one_end(builtin: Served, path: str) -> None:
    """There were two, or none, with several choices, with usage, and after stop strings."""
    for fields in (
        {},
        {"n": 3},
        {"stop": ["e", "a"]},
        {"max_tokens": 1},
        {"stream_options": {"include_usage": True}},
        {"stream_options": {"include_progress": True}},
    ):
        body = {**BODIES[path], "max_tokens": 6, **fields}
        text = builtin.post(path, **body, stream=True).text
        assert text.count("[DONE]") == 1
        assert text.endswith("\n\ndata: [DONE]\n\n")
        ends = [
            choice["finish_reason"]
            for event in text.split("\n\n")
            if event.startswith("data: {")
            for choice in json.loads(event.removeprefix("data: "))["choices"]
            if choice["finish_reason"] is not None
        ]
        assert len(ends) == fields.get("n", 1)


@pytest.mark.parametrize("text", ["🌍", "é🌍ab🚀", "naïve 漢字 🧑‍🚀"])
def test_characters_of_several_tokens_come_whole(builtin: Served, text: str) -> None:
    """Emoji came as replacement characters, or lost their last token."""
    texts, choice = streamed_and_whole(builtin, saying(text, max_tokens=60))
    assert json.loads("".join(texts)) == text
    assert choice["finish_reason"] == "stop"
    assert not any(UNKNOWN in each for each in texts)


def test_what_was_held_back_is_sent_at_the_end(builtin: Served) -> None:
    """The tail was lost if it could have become a stop string, and cut characters were spelled."""
    texts, _ = streamed_and_whole(builtin, saying("ab🌍", max_tokens=60, stop=['🌍"!']))
    assert "".join(texts) == '"ab🌍"'
    for limit in range(1, 12):
        texts, choice = streamed_and_whole(builtin, saying("ab🌍🚀", max_tokens=limit))
        assert '"ab🌍🚀"'.startswith("".join(texts))
        assert UNKNOWN not in "".join(texts)
        if choice["finish_reason"] == "stop":
            break
    assert "".join(texts) == '"ab🌍🚀"'


def test_no_part_of_a_stop_string_is_sent(builtin: Served) -> None:
    """Its first tokens had left before the last one came."""
    text = "zqxj zqxjv"
    texts, choice = streamed_and_whole(builtin, saying(text, max_tokens=60, stop=["zqxjv"]))
    assert choice["finish_reason"] == "stop"
    assert "".join(texts) == '"zqxj '
    plain, _ = streamed_and_whole(builtin, saying(text, max_tokens=60))
    assert sum(map(bool, plain)) > 3  # otherwise nothing was held back


def strict_json(text: str) -> Any:
    def refuse(name: str) -> NoReturn:
        raise AssertionError(name)

    return json.loads(text, parse_constant=refuse)


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_log_probabilities_of_tokens_that_cannot_come_are_valid_json(
    builtin: Served, builtin_core: Core, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """−Infinity is no JSON, and clients failed to parse the whole reply."""
    runner = builtin_core._runner
    original = runner._decode_rows

    def few(sequences: Any, *rest: Any) -> torch.Tensor:
        """Models rule tokens out so: only three may come."""
        rows = torch.full_like(original(sequences, *rest), -torch.inf)
        rows[:, 400:403] = torch.tensor([1.0, 2.0, 3.0])
        return rows

    monkeypatch.setattr(runner, "_decode_rows", few)
    body = {**BODIES[path], "max_tokens": 4, "temperature": 0, "ignore_eos": True}
    body |= {"logprobs": True, "top_logprobs": 20} if path == CHAT else {"logprobs": 20}
    reply = builtin.post(path, **body)
    assert reply.status_code == 200
    found = strict_json(reply.text)["choices"][0]["logprobs"]
    lowest = (
        min(each["logprob"] for token in found["content"] for each in token["top_logprobs"])
        if path == CHAT
        else min(value for top in found["top_logprobs"] for value in top.values())
    )
    assert lowest == -9999
    events = builtin.post(path, **body, stream=True).text.split("\n\n")
    chunks = [strict_json(e.removeprefix("data: ")) for e in events if e.startswith("data: {")]
    assert "-9999" in json.dumps(chunks)
