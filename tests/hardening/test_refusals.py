"""Requests that other servers choked on: each must be refused at once, and harm nobody."""

from __future__ import annotations

import copy
import json
import threading
from typing import Any

import httpx
import pytest

from gemserve import bounded_jinja
from tests.fakes import (
    CHAT,
    COMPLETIONS,
    FILTERED,
    CountingTokenizer,
    FakeCore,
    serving_over,
    wait_for,
)
from tests.served import PATIENCE_S, Served, served

RESPONSES, MESSAGES, FILTER = "/v1/responses", "/v1/messages", "/v1/filter"
LIMIT = 1000  # tokens
LONGEST_TOKEN = 16  # characters, of the built-in tokenizer
TOKENS = 4096  # of the built-in vocabulary
USER = [{"role": "user", "content": "Hi"}]


LIMITED = {MESSAGES: "maximum"}  # Anthropic's clients read the counts of its own sentence


def with_text(path: str, text: str) -> dict[str, Any]:
    if path == RESPONSES:
        return {"input": text}
    if path in (COMPLETIONS, FILTER):
        return {"prompt": text}
    limit = {"max_tokens": 9} if path == MESSAGES else {}
    return {"messages": [{"role": "user", "content": text}], **limit}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES, FILTER])
def test_a_text_of_too_many_characters_is_not_tokenized(tokenizer: Any, path: str) -> None:
    """Tokenizing megabytes, only to refuse them, held up everybody."""
    counting = CountingTokenizer(tokenizer)
    with served(serving_over(FakeCore(), counting, max_prompt_tokens=LIMIT)) as server:
        reply = server.post(path, **with_text(path, "x" * (LIMIT + 1) * LONGEST_TOKEN))
        assert reply.status_code == 400
        assert counting.num_calls == 0
        assert f"{LIMIT} {LIMITED.get(path, 'tokens')}" in reply.json()["error"]["message"]


def test_token_ids_outside_of_the_vocabulary_are_a_400(builtin: Served) -> None:
    """They read foreign memory on a GPU, and killed the engine on a CPU."""
    good = {"prompt": "Hi", "max_tokens": 1}
    wrong: list[tuple[str, str, dict[str, Any]]] = [
        ("/detokenize", "tokens", {"tokens": [TOKENS]}),
        (FILTER, "prompt", {"prompt": [400, TOKENS]}),
        (CHAT, "logit_bias", {"messages": USER, "logit_bias": {str(TOKENS): 1}}),
        (RESPONSES, "stop_token_ids", {"input": "Hi", "stop_token_ids": [TOKENS]}),
    ]
    for bad in (TOKENS, -1, 1 << 40):
        wrong += [
            (COMPLETIONS, "prompt", {**good, "prompt": [400, bad]}),
            (COMPLETIONS, "logit_bias", {**good, "logit_bias": {str(bad): 1}}),
            (COMPLETIONS, "stop_token_ids", {**good, "stop_token_ids": [bad]}),
        ]
    for path, param, fields in wrong:
        reply = builtin.post(path, **fields)
        assert reply.status_code == 400, (path, fields)
        assert reply.json()["error"]["param"].startswith(param)
    last = TOKENS - 1
    fields = {"prompt": [last], "logit_bias": {str(last): 100}, "stop_token_ids": [last]}
    assert builtin.ask(COMPLETIONS, **{**good, **fields})["choices"]


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES])
def test_a_full_queue_answers_before_the_body_is_read(tokenizer: Any, path: str) -> None:
    """Each refusal read and tokenized a long prompt first, which is most of the work."""
    gate = threading.Event()
    counting = CountingTokenizer(tokenizer)
    core = FakeCore(FILTERED, gate)
    with served(serving_over(core, counting, max_queue=1)) as server:
        held = [server.send(COMPLETIONS, prompt="Hi")]
        wait_for(core.started.is_set, PATIENCE_S)
        held.append(server.send(COMPLETIONS, prompt="Hi"))
        wait_for(lambda: server.serving.engine.num_waiting == 1, PATIENCE_S)
        before = counting.num_calls
        with server.connect() as connection:  # of its body nothing ever comes
            head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 10000000\r\n\r\n"
            connection.sendall(head.encode())
            said = b""
            while b"}}" not in said and b'"}' not in said[-40:]:
                said += connection.recv(65536)
        assert said.startswith(b"HTTP/1.1 503")
        assert b"retry-after: " in said.lower()
        assert counting.num_calls == before
        gate.set()
        for each in held:
            assert each.recv(20).startswith(b"HTTP/1.1 200")
            each.close()


def test_equal_request_ids_are_two_requests(tokenizer: Any) -> None:
    """The second one got the first one's answer, or an error."""
    gate = threading.Event()
    core = FakeCore(gate, FILTERED, "fine")
    replies: list[httpx.Response] = []
    with served(serving_over(core, tokenizer)) as server:

        def post() -> None:
            replies.append(server.post(COMPLETIONS, prompt="Hi", headers={"X-Request-Id": "same"}))

        threads = [threading.Thread(target=post) for _ in range(2)]
        for thread in threads:
            thread.start()
        engine = server.serving.engine
        wait_for(lambda: engine.num_running + engine.num_waiting == 2, PATIENCE_S)
        gate.set()
        for thread in threads:
            thread.join(PATIENCE_S)
    assert [reply.status_code for reply in replies] == [200, 200]
    assert [reply.json()["choices"][0]["text"] for reply in replies] == ["fine", "fine"]
    assert {reply.headers["x-request-id"] for reply in replies} == {"same"}
    assert len({reply.json()["id"] for reply in replies}) == 2


def test_a_huge_request_id_goes_nowhere(builtin: Served) -> None:
    """It was echoed, and written into every line of the log."""
    for length in (129, 30_000):
        reply = builtin.get("/health", headers={"X-Request-Id": "x" * length})
        assert reply.status_code == 200
        assert len(reply.headers["x-request-id"]) < 64
    with builtin.connect() as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\nX-Request-Id: ")
        assert refused_head(connection, b"x" * 1_000_000)


def refused_head(connection: Any, rest: bytes) -> bool:
    """Send more of a request's head. Is the connection closed with an error that says why?"""
    try:
        connection.sendall(rest)
    except OSError:  # it was closed before everything was sent
        return True
    said = b""
    try:
        while part := connection.recv(65536):
            said += part
    except ConnectionResetError:
        return True
    return said.startswith(b"HTTP/1.1 4")


def test_a_head_of_a_megabyte_ends_its_connection(builtin: Served) -> None:
    """Headers without end filled the memory: one long one, or very many."""
    bombs = [b"X: " + b"x" * 1_000_000, b"".join(b"X-%d: x\r\n" % i for i in range(60_000))]
    for bomb in bombs:
        with builtin.connect() as connection:
            connection.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n")
            assert refused_head(connection, bomb)
    assert builtin.get("/health").status_code == 200


def test_invented_names_make_no_new_labels(builtin: Served) -> None:
    """Each name, path and method became a label of the metrics, until memory was full."""
    with httpx.Client(base_url=builtin.url, timeout=PATIENCE_S) as client:

        def junk(count: int) -> None:
            for i in range(count):
                body = {"model": f"junk-{count}-{i}", "prompt": "Hi"}
                assert client.post(COMPLETIONS, json=body).status_code == 404
                assert client.get(f"/junk-{count}-{i}").status_code == 404
                assert client.request(f"JUNK{count}X{i}", "/health").status_code == 405

        junk(2)
        builtin.metrics()  # whose own reply has a status, too
        before = set(builtin.metrics())
        junk(100)
        assert set(builtin.metrics()) == before


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": [{}] * 50_000},
        {"stop": [{}] * 50_000},
        {"logit_bias": {"x" * i: "y" for i in range(1, 500)}},
        {f"field{i}": 0 for i in range(50_000)},
        {"prompt": "Hi", "user": 3, "stop": ["x" * 2_000_000] * 2},
    ],
    ids=["ids", "stops", "biases", "names", "long values"],
)
def test_thousands_of_faults_get_a_small_reply(builtin: Served, fields: dict[str, Any]) -> None:
    """The reply listed each fault with its value: larger than the request."""
    reply = builtin.post(COMPLETIONS, **fields)
    assert reply.status_code == 400
    assert len(reply.content) < 1000
    assert set(json.loads(reply.content)["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("stream", [False, True])
def test_no_request_runs_for_ever(tokenizer: Any, stream: bool) -> None:
    """A request that is never done held its slot and its memory until the server stopped."""
    core = FakeCore(FILTERED, "a", threading.Event())
    with served(serving_over(core, tokenizer, request_timeout_s=0.2)) as server:
        reply = server.post(COMPLETIONS, prompt="Hi", stream=stream)
        assert "it took longer than 0.2 s (--request-timeout)" in reply.text
        assert reply.status_code == (200 if stream else 504)
        wait_for(core.cancelled.is_set, PATIENCE_S)
        name = 'request_success_total{finish_reason="error"}'
        wait_for(lambda: server.metrics()[name] == 1, PATIENCE_S)


def test_prompts_that_wait_have_a_limit_together(tokenizer: Any) -> None:
    """A queue counted in requests let a few clients fill the memory with long prompts."""
    gate = threading.Event()
    core = FakeCore(gate, FILTERED, "fine")
    with served(serving_over(core, tokenizer, max_queued_tokens=150)) as server:
        held = [server.send(COMPLETIONS, prompt=[400] * 100)]
        wait_for(core.started.is_set, PATIENCE_S)
        refused = server.post(COMPLETIONS, prompt=[400] * 51)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "queue_full"
        assert "100 tokens of prompts wait, the limit is 150" in refused.text
        assert int(refused.headers["retry-after"]) >= 1
        held.append(server.send(COMPLETIONS, prompt=[400] * 50))
        wait_for(lambda: server.serving.engine.num_waiting == 1, PATIENCE_S)
        assert server.post(COMPLETIONS, prompt=[400]).status_code == 503
        gate.set()
        for each in held:
            assert each.recv(20).startswith(b"HTTP/1.1 200")
            each.close()
        assert server.post(COMPLETIONS, prompt=[400] * 200).status_code == 200


@pytest.mark.parametrize(
    ("template", "said"),
    [
        (
            "{% for a in range(3000) %}{% for b in range(2000) %}{% endfor %}{% endfor %}",
            "takes longer than 0.2 s",
        ),
        ("{{ '=' * width }}", "makes a text of more than 33,554,432 characters"),
    ],
    ids=["loops", "a variable"],
)
def test_a_chat_that_a_template_makes_endless_is_refused(
    tokenizer: Any, template: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Loops in loops took a thread for hours, and a client's number all of the memory."""
    monkeypatch.setattr(bounded_jinja, "MOST_S", 0.2)
    hostile = copy.copy(tokenizer)
    hostile.chat_template = template
    with served(serving_over(FakeCore(), hostile)) as server:
        for path in (CHAT, "/tokenize"):
            reply = server.post(path, messages=USER, chat_template_kwargs={"width": 10**12})
            assert reply.status_code == 400, reply.text
            assert said in reply.text
