"""How other prompt filters failed their users: each case is asked of a whole server."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gemserve.calibration.search.example import ExampleDraw
from gemserve_lab.tasks.needle import SUBTASKS
from tests.fakes import CHAT, COMPLETIONS, data_of, wait_for
from tests.served import KEEP, Served, prose

RESPONSES, MESSAGES, FILTER = "/v1/responses", "/v1/messages", "/v1/filter"
# attention often keeps a prompt's first tokens; the last sentence only protection does
RULES = """You work in the harbour office and answer what visitors ask about the boats.

Speak plainly, and leave out what nobody wants to know about ropes, paint or the price of fish.

Answer in one word. Never mention the weather, and be kind to the cat."""
QUESTION = "What is the code for the lamb?"
Json = dict[str, Any]

LARGEST_PASSAGE = 36  # tokens, of a budget of up to 192


def kept_text(builtin: Served, tokenizer: Any, messages: list[Json], reply: Json) -> str:
    """What the answer was generated from, with the template's marks."""
    ids = builtin.ask("/tokenize", messages=messages)["tokens"]
    assert len(ids) == reply["usage"]["prompt_tokens"]
    kept = [ids[p] for start, stop in reply["filter"]["selection"] for p in range(start, stop)]
    assert len(kept) == reply["filter"]["kept_tokens"] < len(ids)
    return str(tokenizer.decode(kept))


def ask(builtin: Served, messages: list[Json], **fields: Any) -> Json:
    return builtin.ask(CHAT, messages=messages, max_tokens=4, **{"filter": KEEP, **fields})


def test_a_hit_in_the_cache_keeps_the_system_prompt(builtin: Served, tokenizer: Any) -> None:
    """It was silently dropped from the second request on."""
    text = prose(tokenizer, 1500, seed=1)
    system = {"role": "system", "content": RULES}
    replies = []
    for question in (QUESTION, "What is the code for the ship?"):
        messages = [system, {"role": "user", "content": f"{text}\n\n{question}"}]
        replies.append(ask(builtin, messages))
        kept = kept_text(builtin, tokenizer, messages, replies[-1])
        assert RULES in kept
        assert kept.endswith(f"{question}<|end|><|assistant|>")
    cold, hit = (reply["filter"]["cached_tokens"] for reply in replies)
    assert cold == 0
    assert hit > 1000


def test_an_answer_after_a_tool_s_result_comes_from_whole_turns(
    builtin: Served, tokenizer: Any
) -> None:
    """The marks around a long result were thinned out, and the answer was a bare closing tag."""
    messages: list[Json] = [
        {"role": "user", "content": QUESTION},
        {
            "role": "assistant",
            "content": "Let me look it up.",
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "find", "arguments": '{"subject": "lamb"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": prose(tokenizer, 1500, seed=2)},
    ]
    kept = kept_text(builtin, tokenizer, messages, ask(builtin, messages))
    whole = str(tokenizer.decode(builtin.ask("/tokenize", messages=messages)["tokens"]))
    for mark in ("<|begin|>", "<|user|>", "<|assistant|>", "<|end|>"):
        assert kept.count(mark) == whole.count(mark) > 0
    assert QUESTION in kept
    assert kept.endswith("<|end|><|assistant|>")


def test_code_is_kept_in_whole_lines(builtin: Served, tokenizer: Any) -> None:
    """Picks of single tokens left fragments of statements."""
    lines = [f"    total_{i} = compute(first={i}, second=total_{i - 1})" for i in range(1, 60)]
    code = "\n".join(["```python", "def run(total_0):", *lines, "```"])
    before, after = (prose(tokenizer, 300, seed) for seed in (3, 4))
    text = f"{before}\n\n{code}\n\n{after}\n\nWhat is total_40?"
    options = {**KEEP, "keep": 400}
    found = builtin.ask(COMPLETIONS, prompt=text, max_tokens=1, filter=options)["filter"]
    offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
    assert len(offsets) == found["prompt_tokens"]
    kept = {
        at
        for start, stop in found["selection"]
        for position in range(start, stop)
        for at in range(*offsets[position])
    }
    counts = [(len(line), count_kept(text, line, kept)) for line in lines]
    num_whole = sum(length == count for length, count in counts)
    # the budget is exact: what is left of it goes to parts of one more passage
    num_cut = sum(0 < count < length for length, count in counts)
    assert num_whole >= 8, counts
    assert num_cut <= 4, counts


def count_kept(text: str, line: str, kept: set[int]) -> int:
    start = text.index(f"{line}\n")
    return sum(at in kept for at in range(start, start + len(line)))


ROUTES: dict[str, Json] = {
    COMPLETIONS: {"max_tokens": 2},
    CHAT: {"max_tokens": 2},
    RESPONSES: {"max_output_tokens": 16},
    MESSAGES: {"max_tokens": 2},
    FILTER: {},
}


def prompt_for(path: str, text: str) -> Json:
    if path == RESPONSES:
        return {"input": text}
    if path in (COMPLETIONS, FILTER):
        return {"prompt": text}
    return {"messages": [{"role": "user", "content": text}]}


def report_of(builtin: Served, path: str, *, stream: bool, **fields: Any) -> Json:
    """The filter report of a reply, whole or streamed."""
    reply = builtin.post(path, **fields, **({"stream": True} if stream else {}))
    assert reply.status_code == 200, reply.text
    if not stream:
        body: Json = reply.json()
        return dict(body["filter"])
    if path in (COMPLETIONS, CHAT):
        return dict(data_of(reply)[0]["filter"])
    lines = [x.removeprefix("data: ") for x in reply.text.split("\n") if x.startswith("data: ")]
    found = [e.get("response") or e.get("message") or {} for e in map(json.loads, lines)]
    return next(dict(each["filter"]) for each in found if "filter" in each)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", ROUTES)
def test_filter_options_count_on_every_route(
    builtin: Served, tokenizer: Any, path: str, stream: bool
) -> None:
    """They were lost in whole replies, and on a second endpoint; a threshold was ignored."""
    if path == FILTER and stream:
        pytest.skip("it has no stream")
    text = f"{prose(tokenizer, 600, seed=5)}\n\n{QUESTION}"
    for options, method, layer, kept in (
        ({"method": "sieve", "keep": 100, "layer": 1}, "sieve", 1, 100),
        ({"method": "gemfilter", "keep": 64, "layer": 0}, "gemfilter", 0, 64),
        ({"method": "position", "keep": 80}, "position", None, 80),
    ):
        fields = {**prompt_for(path, text), **ROUTES[path], "filter": options}
        report = report_of(builtin, path, stream=stream, **fields)
        assert (report["applied"], report["reason"]) == (True, None)
        chosen = report["kept_tokens"] - report["protected_tokens"]
        assert (report["method"], report["layer"]) == (method, layer)
        if method == "sieve":  # whole passages, and what separates them
            assert 0 <= kept - chosen - report["added_tokens"] < LARGEST_PASSAGE
        else:
            assert (chosen, report["added_tokens"]) == (kept, 0)
        assert (report["protected_tokens"] > 0) == (method != "gemfilter")
        assert report["selection"] is None
    whole = {**prompt_for(path, text), **ROUTES[path], "filter": "none"}
    report = report_of(builtin, path, stream=stream, **whole)
    assert (report["applied"], report["reason"]) == (False, "disabled")


def test_a_request_that_is_aborted_leaves_nothing_in_the_model(
    builtin: Served, tokenizer: Any
) -> None:
    """Patched attention stayed behind, and the next request ran with it."""
    text = prose(tokenizer, 700, seed=6)
    fields = {"prompt": f"{text}\n\n{QUESTION}", "temperature": 0, "max_tokens": 8}

    def answers() -> list[tuple[str, Any]]:
        replies = [
            builtin.ask(COMPLETIONS, **fields, filter=each)
            for each in ("none", KEEP, {**KEEP, "method": "gemfilter"})
        ]
        return [(r["choices"][0]["text"], r["filter"]["selection"]) for r in replies]

    before = answers()
    aborted = 'request_success_total{finish_reason="abort"}'
    count = builtin.metrics().get(aborted, 0.0)
    long = " ".join([text] * 20)
    for method in ("sieve", "none", "snapkv"):
        connection = builtin.send(COMPLETIONS, prompt=f"{method} {long}", filter=method)
        wait_for(lambda: builtin.metrics()["num_requests_running"] == 1, 30)
        connection.close()
        count += 1
        wait_for(lambda count=count: builtin.metrics().get(aborted) == count, 30)
    assert answers() == before


def test_recall_survives_compaction(builtin: Served, tokenizer: Any) -> None:
    """With wrong positions of what was kept, 0 of 21 needles were found."""
    right = 0
    for index in range(21):
        draw = ExampleDraw(seed=6, num_tokens=1024, index=index, samples=21)
        example = SUBTASKS["single"](tokenizer, draw)
        reply = builtin.ask(
            COMPLETIONS,
            prompt=list(example.prompt.ids),
            max_tokens=example.max_tokens,
            temperature=0,
            filter={**KEEP, "keep": 0.125},
        )
        found = reply["filter"]
        documents = len(example.prompt.ids) - found["protected_tokens"]
        read = found["kept_tokens"] - found["protected_tokens"] + found["added_tokens"]
        assert 0 <= -(-documents // 8) - read < LARGEST_PASSAGE
        right += all(answer in reply["choices"][0]["text"] for answer in example.answers)
    assert right >= 18


@pytest.mark.parametrize("method", ["sieve", "gemfilter", "snapkv", "position", "random"])
def test_short_prompts_are_left_alone(builtin: Served, method: str) -> None:
    """Without a least length they got slower and worse."""
    options = {"method": method, "keep": 64, **({"fallback": False} if method == "sieve" else {})}
    fields = {"prompt": [400] * 256, "max_tokens": 1, "filter": options}
    report = builtin.ask(COMPLETIONS, **fields)["filter"]
    assert (report["applied"], report["reason"]) == (False, "short_prompt")
    assert report["kept_tokens"] == report["prompt_tokens"] == 256
    longer = builtin.ask(COMPLETIONS, **{**fields, "prompt": [400] * 257})
    assert longer["filter"]["applied"]
    always = longer["filter"]["protected_tokens"]
    unused = 64 + always - longer["filter"]["kept_tokens"]
    assert 0 <= unused < (LARGEST_PASSAGE if method == "sieve" else 1)
    assert (always > 0) == (method in ("sieve", "position", "random"))


@pytest.mark.parametrize("stream", [False, True])
def test_usage_counts_what_was_sent_and_the_report_what_was_kept(
    builtin: Served, stream: bool
) -> None:
    """Kept tokens were reported, and charged, as the prompt's."""
    fields = {"prompt": [400] * 500, "max_tokens": 2, "ignore_eos": True, "filter": KEEP}
    reply = builtin.post(COMPLETIONS, **fields)
    usage, report = reply.json()["usage"], reply.json()["filter"]
    if stream:
        options = {"include_usage": True}
        chunks = data_of(builtin.post(COMPLETIONS, **fields, stream=True, stream_options=options))
        usage, report = chunks[-1]["usage"], chunks[0]["filter"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (500, 2)
    assert usage["total_tokens"] == 502
    always = report["protected_tokens"]
    assert 0 < always < 100
    kept = report["kept_tokens"]
    assert report["prompt_tokens"] == 500
    assert 0 <= 192 + always - kept < LARGEST_PASSAGE
    details = usage["prompt_tokens_details"]
    assert (details["kept_tokens"], details["protected_tokens"]) == (kept, always)
    assert reply.headers["x-gemserve-prompt-tokens"] == "500"
    assert reply.headers["x-gemserve-kept-tokens"] == str(kept)
