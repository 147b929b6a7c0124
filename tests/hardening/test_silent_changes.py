"""What servers changed without a word: lengths, settings and templates; each case over a socket."""

from __future__ import annotations

from typing import Any

import pytest

from gemserve.calibration.search.example import question_prompt
from gemserve.contract.sampling import SamplingParams
from tests.fakes import CHAT, COMPLETIONS, FakeCore, serving_over
from tests.served import KEEP, Served, prose, served

RESPONSES, MESSAGES, FILTER = "/v1/responses", "/v1/messages", "/v1/filter"
TOKENIZE, COUNT = "/tokenize", "/v1/messages/count_tokens"
LIMIT = 300  # tokens
LIMITED = {MESSAGES: "maximum"}  # Anthropic's clients read the counts of its own sentence


def with_text(path: str, text: str) -> dict[str, Any]:
    if path == RESPONSES:
        return {"input": text, "truncation": "auto"}
    if path in (COMPLETIONS, FILTER):
        return {"prompt": text}
    limit = {"max_tokens": 9} if path == MESSAGES else {}
    return {"messages": [{"role": "user", "content": text}], **limit}


@pytest.mark.parametrize("path", [COMPLETIONS, CHAT, RESPONSES, MESSAGES, FILTER])
def test_no_prompt_is_cut(tokenizer: Any, path: str) -> None:
    """What did not fit was cut off, and the answer was about the rest."""
    core = FakeCore()
    with served(serving_over(core, tokenizer, max_prompt_tokens=LIMIT)) as server:
        fits = "word " * 200
        assert server.post(path, **with_text(path, fits)).status_code == 200
        assert fits.strip() in tokenizer.decode(core.requests[-1].prompt_ids)
        refused = server.post(path, **with_text(path, "word " * (LIMIT + 1)))
        assert refused.status_code == 400
        assert f"{LIMIT} {LIMITED.get(path, 'tokens')}" in refused.json()["error"]["message"]
        assert len(core.requests) == 1


def test_no_answer_is_shorter_than_was_asked_for(builtin: Served) -> None:
    """`max_tokens` beyond the context was lowered without a word."""
    context = builtin.serving.builder.context_tokens
    fields = {"prompt": [400] * 100, "filter": "none"}
    refused = builtin.post(COMPLETIONS, **fields, max_tokens=context - 99)
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert error["param"] == "max_tokens"
    assert str(context - 100) in error["message"]
    reply = builtin.ask(COMPLETIONS, **fields, max_tokens=40, ignore_eos=True)
    assert reply["usage"]["completion_tokens"] == 40
    assert reply["choices"][0]["finish_reason"] == "length"


SETTINGS: dict[str, Any] = {
    "temperature": 0.7,
    "top_p": 0.9,
    "top_k": 30,
    "stop": ["zq"],
    "max_tokens": 17,
}
MORE: dict[str, Any] = {
    "min_p": 0.05,
    "presence_penalty": 0.5,
    "frequency_penalty": -0.5,
    "repetition_penalty": 1.1,
    "logit_bias": {"400": 3},
    "min_tokens": 2,
    "stop_token_ids": [401],
    "seed": 5,
}
NAMES: dict[str, dict[str, str]] = {
    RESPONSES: {"max_tokens": "max_output_tokens"},
    MESSAGES: {"stop": "stop_sequences"},
}


@pytest.mark.parametrize("stream", [False, True])
def test_a_setting_counts_on_every_route_or_is_refused(tokenizer: Any, stream: bool) -> None:
    """Sampling settings worked on one route and were ignored on the next."""
    core = FakeCore()
    seen: list[SamplingParams] = []
    with served(serving_over(core, tokenizer)) as server:
        for path in (COMPLETIONS, CHAT, RESPONSES, MESSAGES):
            text = {k: v for k, v in with_text(path, "Hi").items() if k != "max_tokens"}
            names = NAMES.get(path, {})
            few = {names.get(k, k): v for k, v in SETTINGS.items()}
            all_ = few if path == MESSAGES else {**few, **MORE}
            assert server.post(path, **text, **all_, stream=stream).status_code == 200
            seen.append(core.requests[-1].sampling)
            for name in ("nonsense", "Temperature", *(MORE if path == MESSAGES else ())):
                value = MORE.get(name, 1)
                refused = server.post(path, **text, **few, stream=stream, **{name: value})
                assert refused.status_code == 400
                assert name in refused.text
    assert seen[0] == seen[1] == seen[2]
    assert seen[0].seed == 5
    for name, value in SETTINGS.items():
        found = getattr(seen[3], name)
        assert found == (tuple(value) if isinstance(found, tuple) else value)


def test_one_chat_is_one_prompt_wherever_it_is_sent(builtin: Served, tokenizer: Any) -> None:
    """The chat template was applied on one path only, and missing where prompts were measured."""
    text = prose(tokenizer, 400, seed=21)
    question = "What is the code for the lamb?"
    content = f"{text}\n\n{question}"
    system, user = "Be brief.", {"role": "user", "content": content}
    messages = [{"role": "system", "content": system}, user]
    tokens = builtin.ask(TOKENIZE, messages=messages)["tokens"]
    text_of_tokens = builtin.ask("/detokenize", tokens=tokens)["prompt"]
    assert text_of_tokens.endswith(f"{question}<|end|><|assistant|>")
    counts = {
        "chat": builtin.ask(CHAT, messages=messages, max_tokens=1)["usage"]["prompt_tokens"],
        "filter": builtin.ask(FILTER, messages=messages)["usage"]["prompt_tokens"],
        "responses": builtin.ask(
            RESPONSES, input=content, instructions=system, max_output_tokens=16
        )["usage"]["input_tokens"],
        "messages": builtin.ask(MESSAGES, messages=[user], system=system, max_tokens=1)["filter"][
            "prompt_tokens"
        ],
        "count": builtin.ask(COUNT, messages=[user], system=system)["input_tokens"],
    }
    assert set(counts.values()) == {len(tokens)}, counts
    # what evaluation measures is what a chat's user gets
    measured = question_prompt(tokenizer, text, question)
    assert list(measured.ids) == builtin.ask(TOKENIZE, messages=[user])["tokens"]


def test_a_chat_is_filtered_alike_wherever_it_is_sent(builtin: Served, tokenizer: Any) -> None:
    """On another route the filter saw another prompt, or none."""
    content = f"{prose(tokenizer, 600, seed=22)}\n\nWhat is the code for the lamb?"
    user = {"role": "user", "content": content}
    reports = [
        builtin.ask(CHAT, messages=[user], max_tokens=1, filter=KEEP)["filter"],
        builtin.ask(FILTER, messages=[user], filter=KEEP)["filter"],
        builtin.ask(RESPONSES, input=content, max_output_tokens=16, filter=KEEP)["filter"],
        builtin.ask(MESSAGES, messages=[user], max_tokens=1, filter=KEEP)["filter"],
    ]
    assert reports[0]["applied"]
    assert all(report["selection"] == reports[0]["selection"] for report in reports)
