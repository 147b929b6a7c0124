"""Drawing tokens: extremes of every knob, seeds, and logits no model should produce."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gemserve.contract.filter_options import FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.decoding.sampling import (
    Draw,
    InvalidLogits,
    SamplerState,
    biased,
    draw,
    score_tokens,
    sorted_probabilities,
)
from gemserve.engine.running.draws import draw_tokens
from gemserve.engine.sequence.step_plan import DrawnToken, RunOutput

LOGITS = torch.tensor([1.0, 3.0, 2.0, -1.0, 3.0, -torch.inf])
INF = float("inf")
WHOLE = FilterParams(method="none", keep=16)


def params(**changes: Any) -> SamplingParams:
    return SamplingParams(max_tokens=8, **changes)


class Sampler:
    """One request alone in its batch."""

    def __init__(self, sampling: SamplingParams, prompt: tuple[int, ...] = ()) -> None:
        self.state = SamplerState(sampling, sorted({*prompt}), end_ids=frozenset({0}))

    def draw(self, logits: torch.Tensor) -> int:
        (result,) = draw(logits[None], [self.state])
        if isinstance(result, InvalidLogits):
            raise result
        return result.token


def filtered_probabilities(logits: torch.Tensor, sampling: SamplingParams) -> torch.Tensor:
    """What may be drawn, by token id."""
    probabilities, ids = sorted_probabilities(logits[None], [sampling])
    return torch.zeros_like(logits).scatter_(0, ids[0], probabilities[0])


def draws(logits: torch.Tensor, count: int, **changes: Any) -> list[int]:
    sampler = Sampler(params(**changes))
    return [sampler.draw(logits) for _ in range(count)]


def test_temperature_zero_takes_the_largest_and_ignores_the_rest() -> None:
    assert set(draws(LOGITS, 5, temperature=0.0, top_p=0.1, top_k=1, seed=3)) == {1}


@pytest.mark.parametrize("temperature", [1e-2, 1e-6, 1e-30])
def test_a_tiny_temperature_is_no_nan(temperature: float) -> None:
    probabilities = filtered_probabilities(LOGITS * 1e4, params(temperature=temperature))
    assert torch.isfinite(probabilities).all()
    assert float(probabilities.sum()) == pytest.approx(1)
    assert set(draws(LOGITS * 1e4, 20, temperature=temperature, seed=0)) <= {1, 4}


@pytest.mark.parametrize("temperature", [1e-46, 1e-320, 5e-324])
def test_a_temperature_below_float32_is_no_nan(temperature: float) -> None:
    assert set(draws(LOGITS, 20, temperature=temperature, seed=0)) <= {1, 4}


def test_logits_are_not_changed() -> None:
    before = LOGITS.clone()
    draws(LOGITS, 3, top_k=2, top_p=0.5, temperature=0.7)
    assert torch.equal(LOGITS, before)


@pytest.mark.parametrize("top_k", [1, 2, 3, 5])
def test_top_k_keeps_k(top_k: int) -> None:
    probabilities = filtered_probabilities(LOGITS, params(top_k=top_k))
    assert int((probabilities > 0).sum()) == top_k
    assert probabilities[1] > 0  # of equal logits the lower id


@pytest.mark.parametrize("top_k", [0, 6, 10**30])
def test_top_k_beyond_the_vocabulary_is_off(top_k: int) -> None:
    probabilities = filtered_probabilities(LOGITS, params(top_k=top_k))
    torch.testing.assert_close(probabilities, LOGITS.softmax(-1))


@pytest.mark.parametrize("top_p", [1e-9, 1e-3, 0.2, 0.5, 0.999999])
@pytest.mark.parametrize("logits", [LOGITS, torch.zeros(1000), torch.tensor([0.0])])
def test_top_p_keeps_the_smallest_set_and_at_least_one(logits: torch.Tensor, top_p: float) -> None:
    probabilities = filtered_probabilities(logits, params(top_p=top_p))
    kept = probabilities > 0
    mass = logits.softmax(-1)[kept].sort(descending=True).values
    assert len(mass) >= 1
    assert float(mass.sum()) >= top_p - 1e-5
    assert float(mass[:-1].sum()) < top_p + 1e-5
    assert float(probabilities.sum()) == pytest.approx(1)


def test_top_p_counts_within_top_k() -> None:
    probabilities = filtered_probabilities(torch.zeros(10), params(top_k=4, top_p=0.5))
    assert probabilities.tolist() == [0.5, 0.5] + [0.0] * 8


@pytest.mark.parametrize("seed", [0, 1, -1, -(2**70), 2**63 - 1, 2**63, 2**64, 10**30])
def test_a_seed_gives_the_same_draws(seed: int) -> None:
    logits = torch.zeros(1000)
    assert draws(logits, 10, seed=seed) == draws(logits, 10, seed=seed)


def test_seeds_differ_and_no_seed_is_random() -> None:
    logits = torch.zeros(1000)
    drawn = [draws(logits, 10, seed=seed) for seed in (1, 2, -1, None, None)]
    assert len({tuple(d) for d in drawn}) == len(drawn)


def test_a_seed_is_independent_of_other_requests() -> None:
    logits = torch.zeros(1000)
    alone = draws(logits, 5, seed=7)
    mine, other = Sampler(params(seed=7)), Sampler(params(seed=8))
    together = []
    for _ in range(5):
        other.draw(logits)
        torch.rand(3)
        together.append(mine.draw(logits))
    assert together == alone


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "bad", [[float("nan"), 1.0], [1.0, float("nan")], [-INF, -INF], [INF, 1.0]]
)
def test_logits_that_are_not_finite_are_refused(bad: list[float], temperature: float) -> None:
    with pytest.raises(InvalidLogits):
        Sampler(params(temperature=temperature)).draw(torch.tensor(bad))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 2.0])
def test_minus_infinity_is_never_drawn(temperature: float) -> None:
    logits = torch.full((50,), -torch.inf)
    logits[[3, 40]] = torch.tensor([-1e4, -1e4])
    assert set(draws(logits, 200, temperature=temperature, seed=1)) <= {3, 40}


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_draws_follow_the_softmax(temperature: float) -> None:
    logits, count = torch.tensor([0.0, 1.0, 2.0, 0.5, -1.0]), 4000
    drawn = draws(logits, count, temperature=temperature, seed=5)
    expected = (logits / temperature).softmax(-1) * count
    seen = torch.bincount(torch.tensor(drawn), minlength=5)
    # 18.47 is the 0.999 quantile of chi-square with 4 degrees of freedom
    assert float(((seen - expected) ** 2 / expected).sum()) < 18.47


def test_a_row_that_is_bad_leaves_the_others() -> None:
    rows = torch.stack([LOGITS, torch.full((6,), torch.nan), LOGITS])
    states = [SamplerState(params(temperature=t), (), frozenset()) for t in (0.0, 1.0, 0.0)]
    first, bad, last = draw(rows, states)
    assert isinstance(bad, InvalidLogits)
    assert isinstance(first, Draw)
    assert isinstance(last, Draw)
    assert first.token == last.token == 1


def test_a_batch_draws_what_each_would_alone() -> None:
    """Rows of one batch have their own temperature, top_k, top_p, min_p and seed."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(40, 300, generator=generator) * 3
    settings = [
        params(
            temperature=(0.0, 0.5, 1.0, 1.7)[i % 4],
            top_k=(0, 5, 50)[i % 3],
            top_p=(1.0, 0.9, 0.3)[i % 3],
            min_p=(0.0, 0.05)[i % 2],
            seed=i,
        )
        for i in range(40)
    ]
    states = [SamplerState(p, (), frozenset()) for p in settings]
    for _ in range(3):
        together = draw(logits, states)
    for i, p in enumerate(settings):
        alone = Sampler(p)
        tokens = [alone.draw(logits[i]) for _ in range(3)]
        result = together[i]
        assert isinstance(result, Draw)
        assert result.token == tokens[-1]


def test_min_p_keeps_what_is_near_the_best() -> None:
    logits = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    kept = filtered_probabilities(logits, params(min_p=0.5)) > 0
    assert kept.tolist() == [True, True, False, False]


def test_penalties_and_bias_follow_their_definitions() -> None:
    """Presence and frequency count generated tokens; repetition also the prompt's."""
    logits = torch.tensor([2.0, 1.0, -1.0, 0.5])
    sampling = params(
        presence_penalty=0.5,
        frequency_penalty=0.25,
        repetition_penalty=2.0,
        logit_bias=((3, 4.0),),
    )
    state = SamplerState(sampling, (2,), frozenset())
    for token in (0, 0, 1):
        state.note(token)
    (adjusted,) = biased(logits[None], [state])
    assert adjusted.tolist() == [2.0 / 2 - 0.5 - 0.5, 1.0 / 2 - 0.5 - 0.25, -1.0 * 2, 4.5]
    assert logits.tolist() == [2.0, 1.0, -1.0, 0.5]


def test_the_end_is_not_drawn_before_min_tokens() -> None:
    logits = torch.tensor([9.0, 1.0, 8.0])
    sampler = Sampler(params(temperature=0.0, min_tokens=2, stop_token_ids=(2,)))
    assert [sampler.draw(logits) for _ in range(3)] == [1, 1, 0]


def test_logprobs_are_the_model_s_own() -> None:
    """Before temperature and penalties, so that they mean the same for every request."""
    state = SamplerState(params(temperature=0.2, logprobs=2, seed=0), (), frozenset())
    (result,) = draw(LOGITS[None], [state])
    assert isinstance(result, Draw)
    assert result.logprob is not None
    expected = LOGITS.log_softmax(-1)
    assert result.logprob.logprob == pytest.approx(float(expected[result.token]))
    assert [t for t, _ in result.logprob.top] == [1, 4]


def test_rows_of_every_kind_are_drawn_together_as_alone() -> None:
    """One transfer for all of them, and each row's own numbers."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(6, 50, generator=generator) * 3
    logits[4, 7] = torch.nan
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.3, "seed": 3, "top_p": 0.9, "logprobs": 3},
        {"temperature": 0.0, "presence_penalty": 1.5, "logit_bias": ((3, 9.0),), "logprobs": 3},
        {"temperature": 0.7, "seed": 4, "top_k": 5, "repetition_penalty": 1.4, "min_tokens": 2},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 1.0, "seed": 6, "min_p": 0.2, "logprobs": 0},
    ]

    def states() -> list[SamplerState]:
        return [SamplerState(params(**kind), (1, 2), frozenset({0})) for kind in kinds]

    before = logits.clone()
    together, apart = states(), states()
    for _ in range(3):
        ours = draw(logits, together)
        theirs = [draw(row[None], [state])[0] for row, state in zip(logits, apart, strict=True)]
        assert isinstance(ours.pop(4), InvalidLogits)
        assert isinstance(theirs.pop(4), InvalidLogits)
        assert ours == theirs
    assert torch.equal(logits.nan_to_num(0), before.nan_to_num(0))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_plain_rows_wait_for_the_device_once(
    temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[str] = []
    for name in ("tolist", "item", "__bool__", "__int__", "__float__"):
        original = getattr(torch.Tensor, name)

        def counted(self: Any, *rest: Any, name: str = name, original: Any = original) -> Any:
            if self.numel() > 1 or self.dtype != torch.float64:  # a request's own random number
                waits.append(name)
            return original(self, *rest)

        monkeypatch.setattr(torch.Tensor, name, counted)
    states = [
        SamplerState(params(temperature=temperature, seed=i), (), frozenset()) for i in range(4)
    ]
    logits = torch.randn(4, 30)
    for _ in range(2):
        assert len(draw(logits, states)) == 4
    assert waits == ["tolist"] * 2


def test_a_thousand_biases_cost_little_in_every_step() -> None:
    """With 64 choices they doubled the duration of everybody's steps."""
    bias = tuple((token, token / 7 - 50) for token in range(1024))
    states = [SamplerState(SamplingParams(max_tokens=9, logit_bias=bias), (), frozenset({0}))] * 64
    logits = torch.randn(64, 4096)
    expected = logits.clone()
    expected[:, :1024] = (
        logits[:, :1024].double() + torch.tensor([value for _, value in bias]).double()
    ).float()
    started_s = time.process_time()
    for _ in range(20):
        found = biased(logits, states)
    taken_s = time.process_time() - started_s
    assert torch.allclose(found, expected, atol=1e-5)
    assert not torch.equal(found, logits)
    assert taken_s < 1.5  # 0.04 s; it was 2.3 s


def test_a_row_draws_alone_what_it_draws_beside_others() -> None:
    """Rows that top_k or top_p cuts are sorted, the others are not."""
    rows = torch.randn(6, 300, generator=torch.Generator().manual_seed(1))
    settings = [{}, {"top_k": 5}, {"min_p": 0.2}, {"top_p": 0.7}, {"temperature": 0.0}, {}]
    for seed in range(20):
        sampling = [params(**{"temperature": 0.9, "seed": seed, **each}) for each in settings]
        alone = [Sampler(each).draw(row) for each, row in zip(sampling, rows, strict=True)]
        together = draw(rows, [Sampler(each).state for each in sampling])
        assert [result.token for result in together if isinstance(result, Draw)] == alone


def test_the_last_bits_of_logits_hardly_change_a_draw() -> None:
    """Bug: of two tokens with nearly equal logits another came first in another batch.

    Sorted, they changed places, and a number that fell on one fell on the other.
    """
    rng = torch.Generator().manual_seed(0)
    logits = 1e-6 * torch.randn(2000, generator=rng)  # nearly equal, all of them
    others = logits + 1e-6 * torch.randn(2000, generator=rng)
    seeds = range(200)
    one = [draws(logits, 1, temperature=1.0, seed=seed) for seed in seeds]
    other = [draws(others, 1, temperature=1.0, seed=seed) for seed in seeds]
    assert sum(a != b for a, b in zip(one, other, strict=True)) <= 1


def test_the_lowest_log_probability_is_a_number() -> None:
    """A model that rules tokens out made replies with -Infinity, which is no JSON."""
    logits = torch.tensor([[1.0, -torch.inf, 1.0, -torch.inf]])
    (scored,) = score_tokens(logits, [1], 3)
    assert scored.logprob == -9999.0
    assert [value for _, value in scored.top[2:]] == [-9999.0]
    assert scored.top[0][1] == pytest.approx(-0.6931, abs=1e-4)


def test_penalties_on_all_tokens_take_no_loop() -> None:
    """128 choices with a repetition penalty, over a prompt of all tokens, took 0.8 s a step."""
    logits = torch.randn(64, 4096, generator=torch.Generator().manual_seed(0))
    sampling = params(repetition_penalty=1.1, frequency_penalty=0.1, temperature=0.0)
    states = [SamplerState(sampling, range(4096), frozenset()) for _ in range(64)]
    draw(logits, states)
    began_s = time.process_time()
    for _ in range(5):
        draw(logits, states)
    assert time.process_time() - began_s < 1  # it was 2


def test_choices_of_a_long_prompt_begin_at_once() -> None:
    """128 of them with a repetition penalty stopped the engine for 3 s before their first token."""
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, 1 << 15, 1 << 17).tolist()
    sampling = params(repetition_penalty=2.0, frequency_penalty=0.5, temperature=0.0)
    one = Request(request_id="a", prompt_ids=prompt, sampling=sampling, filter=WHOLE)
    choices = [replace(one, request_id=f"{number}") for number in range(128)]
    began_s = time.thread_time()
    states = [SamplerState(c.sampling, c.penalized_ids, frozenset()) for c in choices]
    assert time.thread_time() - began_s < 0.1
    logits = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0))
    drawn = [40_000, prompt[0], 40_000, 50_000, prompt[0], prompt[1]]
    counts = Counter(drawn)
    known = {*prompt, *drawn}
    is_known = [token in known for token in range(len(logits))]
    for token in drawn:
        states[5].note(token)
    expected = [
        (value / 2 if value > 0 else value * 2) - 0.5 * counts[token] if is_penalized else value
        for token, (value, is_penalized) in enumerate(zip(logits.tolist(), is_known, strict=True))
    ]
    assert biased(logits[None], [states[5]])[0].tolist() == pytest.approx(expected)
    plain = replace(one, sampling=params(frequency_penalty=0.5))
    assert len(plain.penalized_ids) == 0


def test_penalties_count_what_was_drawn_after_each_step() -> None:
    """Tokens that only the answer has are added as they come; each draw counts once."""
    sampling = params(temperature=0.0, frequency_penalty=1.0, repetition_penalty=2.0)
    sampler = Sampler(sampling, prompt=(5, 5))
    logits = torch.tensor([8.0, 7.5, 4.0, 3.5] + [0.0] * 60)
    expected: list[int] = []
    for _ in range(12):
        values = [
            (value / 2 if token in {5, *expected} else value) - expected.count(token)
            for token, value in enumerate(logits.tolist())
        ]
        expected.append(max(range(len(values)), key=lambda token: values[token]))
        assert sampler.draw(logits) == expected[-1]
    assert len(set(expected)) > 2


def test_a_batch_of_draws_that_fails_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens were drawn one by one for ever, and nobody heard of it."""

    def draw_alone(rows: torch.Tensor, samplers: Any) -> list[Draw]:
        if len(samplers) > 1:
            raise RuntimeError("no batches")
        return [Draw(token=int(rows[0].argmax()), logprob=None)]

    monkeypatch.setattr("gemserve.engine.running.draws.draw", draw_alone)
    samplers = {number: Sampler(params()).state for number in (4, 9)}
    out = RunOutput()
    draw_tokens([([4, 9], torch.eye(2))], samplers, {}, out)
    assert {n: [each.token for each in drawn] for n, drawn in out.drawn.items()} == {4: [0], 9: [1]}
    assert out.retried == [("draw_batch", "RuntimeError: no batches")]


@pytest.mark.parametrize(
    ("proposed", "expected"),
    [((2, 1), [2, 1, 0]), ((2, 0), [2, 1]), ((1, 1), [2])],
    ids=["all", "the first", "none"],
)
def test_rows_are_drawn_from_as_far_as_proposals_were_right(
    proposed: tuple[int, ...], expected: list[int]
) -> None:
    """The row behind a wrong proposal has seen a token that is not the answer's."""
    rows = torch.eye(3)[[2, 1, 0]]
    out = RunOutput()
    samplers = {number: Sampler(params(temperature=0.0)).state for number in (4, 9)}
    draw_tokens([([4, 4, 4], rows), ([9], rows[:1])], samplers, {4: proposed}, out)
    assert {n: [each.token for each in drawn] for n, drawn in out.drawn.items()} == {
        4: expected,
        9: [2],
    }


def test_proposals_change_nothing_about_what_is_drawn_at_random() -> None:
    """With one seed, the same tokens in steps of one row and of several."""
    logits = torch.randn(40, 4, generator=torch.Generator().manual_seed(1))
    given = params(temperature=1.0, seed=3, presence_penalty=0.5, logprobs=2)
    alone = Sampler(given).state
    expected = [draw(row[None], [alone])[0] for row in logits]
    state, found = Sampler(given).state, list[DrawnToken]()
    while len(found) < len(logits):
        out = RunOutput()
        some = logits[len(found) : len(found) + 4]
        draw_tokens([([1] * len(some), some)], {1: state}, {1: (0, 1, 2)}, out)
        found += out.drawn[1]
    assert [(each.token, each.logprob) for each in found] == [
        (each.token, each.logprob) for each in expected if isinstance(each, Draw)
    ]
