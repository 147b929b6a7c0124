"""One client's huge prompt must not make the others wait."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from typing import Any

import pytest

from tests.fakes import COMPLETIONS, FILTERED, FakeCore, live_server, serving_over

# The promise is 100 ms. Three times that here, in the best of three tries: the machines that run
# tests are shared and noisy, while what this guards against (tokenizing under the interpreter lock)
# takes seconds every time.
SLOWEST_S = 0.3
TRIES = 3
MILLION = 1_000_000


def slowest_health(url: str, body: bytes, path: str = COMPLETIONS) -> tuple[int, float]:
    """The reply's status and the longest time without a `/health`, in the calmest of the tries."""
    for _ in range(TRIES):
        status, worst_s = slowest_health_once(url, body, path)
        if worst_s < SLOWEST_S:
            break
    return status, worst_s


def slowest_health_once(url: str, body: bytes, path: str) -> tuple[int, float]:
    """Post `body`; the reply's status and the longest time without a `/health` meanwhile."""
    statuses: list[int] = []

    def post() -> None:
        request = urllib.request.Request(f"{url}{path}", body, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                reply.read()
                statuses.append(reply.status)
        except urllib.error.HTTPError as error:
            statuses.append(error.code)

    thread = threading.Thread(target=post)
    worst_s = 0.0
    last_s = time.monotonic()
    thread.start()
    while thread.is_alive():
        with urllib.request.urlopen(f"{url}/health", timeout=60) as reply:
            assert reply.status == 200
        # from answer to answer: a server that freezes, freezes this thread between requests too
        now_s = time.monotonic()
        worst_s, last_s = max(worst_s, now_s - last_s), now_s
    thread.join(60)
    return statuses[0], worst_s


def body_of(**fields: Any) -> bytes:
    return json.dumps({"model": "fake", **fields}).encode()


def text_of_length(num_chars: int) -> str:
    words = "The river runs past 12 houses, they say; nobody counts them. "
    return (words * (num_chars // len(words) + 1))[:num_chars]


def test_a_20_mb_prompt_that_is_too_long_delays_nobody(tokenizer: Any) -> None:
    with live_server(serving_over(FakeCore(), tokenizer)) as url:
        status, worst_s = slowest_health(url, body_of(prompt=text_of_length(20 * MILLION)))
    assert status == 400
    assert worst_s < SLOWEST_S


def test_tokenizing_a_long_prompt_delays_nobody(tokenizer: Any) -> None:
    """Below the limit, so that it really is tokenized; a second or two of work."""
    limits = {"max_prompt_tokens": 20 * MILLION, "context_tokens": 21 * MILLION}
    with live_server(serving_over(FakeCore(), tokenizer, **limits)) as url:
        status, worst_s = slowest_health(url, body_of(prompt=text_of_length(2 * MILLION)))
    assert status == 200
    assert worst_s < SLOWEST_S


TOKENIZING: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": text_of_length(2 * MILLION), "return_token_strs": True},
    "/detokenize": {"tokens": [300, 301, 302, 303] * (MILLION // 4)},
}


@pytest.mark.parametrize("path", TOKENIZING)
def test_a_long_text_to_tokenize_delays_nobody(tokenizer: Any, path: str) -> None:
    """Far beyond the context; so is the reply, whose JSON must not be made in one go either."""
    with live_server(serving_over(FakeCore(), tokenizer)) as url:
        status, worst_s = slowest_health(url, body_of(**TOKENIZING[path]), path)
    assert status == 200
    assert worst_s < SLOWEST_S


def longest_pause(url: str) -> float:
    """The longest time without a chunk of a stream while a long text is tokenized."""
    body = body_of(prompt="Hi", stream=True)
    is_tokenized = threading.Event()

    def tokenize() -> None:
        slowest_health_once(url, body_of(**TOKENIZING["/tokenize"]), "/tokenize")
        is_tokenized.set()

    worst_s = 0.0
    thread = threading.Thread(target=tokenize)
    with urllib.request.urlopen(f"{url}{COMPLETIONS}", body, timeout=60) as stream:
        assert stream.readline()
        thread.start()
        last_s = time.monotonic()
        while not is_tokenized.is_set():
            assert stream.readline()  # else the stream has ended first
            now_s = time.monotonic()
            worst_s, last_s = max(worst_s, now_s - last_s), now_s
    thread.join(60)
    return worst_s


def test_a_stream_goes_on_while_a_long_text_is_tokenized(tokenizer: Any) -> None:
    core = FakeCore(FILTERED, *["word ", 0.01] * 6000)  # a minute
    with live_server(serving_over(core, tokenizer)) as url:
        assert any(longest_pause(url) < SLOWEST_S for _ in range(TRIES))


WRONG: list[dict[str, Any]] = [
    {"prompt": [{}] * 200_000},
    {"stop": [{}] * 200_000},
    {f"field{i}": 0 for i in range(200_000)},
]


@pytest.mark.parametrize("fields", WRONG, ids=["ids", "stops", "names"])
def test_many_wrong_values_delay_nobody(tokenizer: Any, fields: dict[str, Any]) -> None:
    """One error is shown; building the others must not cost seconds and gigabytes."""
    with live_server(serving_over(FakeCore(), tokenizer)) as url:
        status, worst_s = slowest_health(url, body_of(**fields))
    assert status == 400
    assert worst_s < SLOWEST_S
