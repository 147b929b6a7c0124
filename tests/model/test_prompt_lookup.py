"""Prompt-lookup decoding in the engine: the same answers, in fewer steps."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jsonschema
import pytest

from gemserve.config import EngineConfig, ModelConfig, Switch
from gemserve.contract.events import Event, Finished, TextDelta, TokenLogprob
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import Grammar, SamplingParams
from gemserve.engine.build import build_core
from gemserve.engine.core import Core
from gemserve.errors import ConfigError
from gemserve.model.passes.causal_model import CausalModel
from tests import models
from tests.compiled_step import compiled_step, needs_compiler
from tests.cores import core_over
from tests.model.test_query_rows import ids_of
from tests.model.test_selection import NoText

pytestmark = needs_compiler
CONFIG = EngineConfig(kv_memory_bytes=16 << 20, filter_min_tokens=256, filter_layer=2)


@pytest.fixture(autouse=True)
def compiler() -> Iterator[None]:
    with compiled_step():
        yield


def core(lookup: Switch, name: str = "llama", eos: frozenset[int] = frozenset()) -> Core:
    config = replace(CONFIG, prompt_lookup=lookup)
    return core_over(CausalModel(models.build(name)), NoText(), config, eos)


def asked(number: int, length: int = 90, keep: int | None = None, **sampling: Any) -> Request:
    """A prompt that says the same several times, so that an answer may go on saying it."""
    part = ids_of(30, number)
    ids = (part * (length // 30 + 1))[:length]
    method = "none" if keep is None else "sieve"
    return Request(
        request_id=str(number),
        prompt_ids=ids,
        sampling=SamplingParams(**{"max_tokens": 60, "temperature": 0.0} | sampling),
        filter=FilterParams(method=method, keep=keep or 64),
    )


class Seen:
    """All that one request's events say."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] = []
        self.ends: list[Finished] = []

    def see(self, event: Event) -> None:
        assert not self.ends
        if isinstance(event, TextDelta):
            self.tokens += event.token_ids
            self.logprobs += event.logprobs
        elif isinstance(event, Finished):
            self.ends.append(event)

    @property
    def end(self) -> Finished:
        (end,) = self.ends
        return end


def answers(engine: Core, requests: list[Request]) -> tuple[list[Seen], int]:
    """What the requests get that run together, and how many steps that took."""
    jobs = {engine.add(request): Seen() for request in requests}
    steps = 0
    while not engine.is_idle:
        for job, event in engine.step():
            jobs[job].see(event)
        engine.check_integrity()
        steps += 1
    return list(jobs.values()), steps


REQUESTS = {
    "greedy": asked(1),
    "penalties": asked(2, repetition_penalty=1.2, presence_penalty=0.3),
    "logprobs": asked(3, logprobs=3),
    "seeded": asked(4, temperature=0.4, seed=5),
    "bias": asked(5, logit_bias=((7, 4.0),)),
    "one token": asked(6, max_tokens=1),
    "two tokens": asked(7, max_tokens=2),
    "filtered": asked(8, length=900, keep=100),
    "least tokens": asked(9, min_tokens=20),
}


def test_answers_are_the_same_to_the_last_bit() -> None:
    """One by one, and all together."""
    requests = list(REQUESTS.values())
    expected = [answers(core("off"), [request])[0][0] for request in requests]
    alone = [answers(core("on"), [request])[0][0] for request in requests]
    together, _ = answers(core("on"), requests)
    for name, one, *others in zip(REQUESTS, expected, alone, together, strict=True):
        for other in others:
            assert (other.tokens, other.logprobs) == (one.tokens, one.logprobs), name
            assert other.end.reason == one.end.reason
            assert other.end.completion_tokens == one.end.completion_tokens == len(one.tokens)
    assert sum(one.end.accepted_tokens for one in alone) > 50
    assert all(one.end.accepted_tokens <= one.end.proposed_tokens for one in alone)
    assert not any(one.end.proposed_tokens for one in expected)


def test_an_end_among_proposed_tokens_ends_the_answer() -> None:
    """Nothing that was drawn behind it may be seen."""
    whole = answers(core("off"), [REQUESTS["greedy"]])[0][0]
    stop = whole.tokens[40]
    expected = answers(core("off", eos=frozenset({stop})), [REQUESTS["greedy"]])[0][0]
    found = answers(core("on", eos=frozenset({stop})), [REQUESTS["greedy"]])[0][0]
    assert found.tokens == expected.tokens
    assert found.end.reason == "stop"
    by_request = asked(1, stop_token_ids=(stop,))
    found = answers(core("on"), [by_request])[0][0]
    assert found.tokens == expected.tokens
    assert found.end.completion_tokens == len(expected.tokens)


def test_an_answer_that_repeats_takes_fewer_steps() -> None:
    before, after = (answers(core(switch), [REQUESTS["greedy"]])[1] for switch in ("off", "on"))
    assert after < 0.6 * before


def test_its_memory_is_as_large_as_without() -> None:
    """Proposals never go beyond the room of the longest answer."""
    one, other = (answers(core(switch), [REQUESTS["greedy"]])[0][0] for switch in ("off", "on"))
    assert one.end.peak_kv_bytes == other.end.peak_kv_bytes


@pytest.mark.parametrize("name", ["mistral-window", "qwen2-window"])
def test_models_with_sliding_windows_propose_nothing(name: str) -> None:
    """What a wrong token pushes out of a window could not be brought back."""
    (seen,), _ = answers(core("auto", name), [asked(1)])
    assert seen.end.proposed_tokens == 0
    with pytest.raises(ConfigError, match=r"prompt_lookup=on: .*sliding window"):
        core("on", name)


def test_without_a_compiled_step_it_is_off(monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(CONFIG, cpu_step="off", prompt_lookup="auto")
    model = CausalModel(models.build("llama"))
    (seen,), _ = answers(core_over(model, NoText(), config, frozenset()), [asked(1)])
    assert seen.end.proposed_tokens == 0
    with pytest.raises(ConfigError, match="prompt_lookup=on: decode steps are not compiled"):
        core_over(model, NoText(), replace(config, prompt_lookup="on"), frozenset())


def test_a_failing_step_with_proposals_ends_its_request_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    engine = core("on")
    run = engine._runner._decode_rows

    def failing(rows: Any, *rest: Any) -> Any:
        if any(row.proposed and row.sequence == 1 for row in rows):
            raise RuntimeError("no memory")
        return run(rows, *rest)

    monkeypatch.setattr(engine._runner, "_decode_rows", failing)
    (first, second), _ = answers(engine, [REQUESTS["greedy"], REQUESTS["logprobs"]])
    assert first.end.error == "RuntimeError: no memory"
    assert second.end.reason == "length"
    expected = answers(core("off"), [REQUESTS["logprobs"]])[0][0]
    assert (second.tokens, second.logprobs) == (expected.tokens, expected.logprobs)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_grammar_holds_and_ends_the_answer(temperature: float) -> None:
    """What an answer may say next depends on all tokens before it, proposed or not."""
    words = {"type": "string", "enum": ["the lantern in the harbour", "the harbour's lantern"]}
    schema = {"type": "array", "items": words, "minItems": 6, "maxItems": 8}
    settings = EngineConfig(kv_memory_bytes=64 << 20)
    found = []
    switches: tuple[Switch, ...] = ("off", "on")
    for lookup in switches:
        engine = build_core(ModelConfig(device="cpu"), replace(settings, prompt_lookup=lookup))
        prompt = engine.tokenizer.encode("the lantern in the harbour, the harbour's lantern: ")
        one = replace(
            asked(1),
            prompt_ids=prompt,
            sampling=SamplingParams(max_tokens=400, temperature=temperature, seed=7),
            grammar=Grammar(json.dumps(schema)),
        )
        found.append(answers(engine, [one])[0][0])
        text = engine.tokenizer.decode(found[-1].tokens, skip_special_tokens=True)
        jsonschema.validate(json.loads(text), schema)
    off, on = found
    assert (on.tokens, on.end.reason) == (off.tokens, "stop")
    assert on.end.accepted_tokens > 0
