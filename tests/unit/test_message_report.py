"""How much was kept of each message: the counts add up to those of the whole prompt."""

from __future__ import annotations

import random

import pytest

from gemserve.contract.filter_options import FilterParams
from gemserve.contract.filter_plan import Budget, FilterPlan
from gemserve.contract.prompt_parts import MessagePlace, Priority, ProtectedRange
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.filtering.message_report import report_messages
from gemserve.filtering.protected_budget import always_read


def drawn_request(rng: random.Random, *, protects: bool) -> Request:
    """A chat of random places with ranges that do not care for them."""
    num_tokens = rng.randrange(1, 200)
    edges = sorted(rng.randrange(num_tokens + 1) for _ in range(2 * rng.randrange(6)))
    places = tuple(
        MessagePlace(index, rng.choice(["system", "user", "assistant", "tool"]), start, stop)
        for index, (start, stop) in enumerate(zip(edges[::2], edges[1::2], strict=True))
    )
    protected = tuple(
        ProtectedRange(start, start + rng.randrange(60), rng.choice(list(Priority)))
        for start in (rng.randrange(-5, num_tokens + 5) for _ in range(rng.randrange(6)))
    )
    count = len(always_read(protected, num_tokens)) if protects else 0
    budget = Budget(low=count, high=count, limit=count, protected=count)
    return Request(
        request_id="r",
        prompt_ids=[7] * num_tokens,
        sampling=SamplingParams(max_tokens=1),
        filter=FilterParams(method="sieve", keep=16),
        protected=protected,
        messages=places,
        plan=FilterPlan(reason=None, num_kept=count, budget=budget, fails_open=False),
    )


@pytest.mark.parametrize("protects", [True, False])
def test_the_counts_of_messages_add_up(protects: bool) -> None:
    """A token that two messages shared, or none had, made the parts differ from the whole."""
    for seed in range(500):
        rng = random.Random(seed)
        request = drawn_request(rng, protects=protects)
        num_tokens = len(request.prompt_ids)
        assert request.plan is not None
        firm = set(always_read(request.protected, num_tokens)) if protects else set()
        others = set(rng.sample(range(num_tokens), rng.randrange(num_tokens + 1)))
        kept = sorted(firm | others)
        for positions in (kept, None):
            reports = report_messages(request, positions)
            assert reports is not None
            *of_messages, template = reports
            whole = len(kept) if positions is not None else num_tokens
            assert sum(report.tokens for report in reports) == num_tokens, seed
            assert sum(report.kept_tokens for report in reports) == whole, seed
            protected = sum(report.protected_tokens for report in reports)
            assert protected == request.plan.budget.protected == len(firm), seed
            for report in reports:
                assert 0 <= report.protected_tokens <= report.kept_tokens <= report.tokens, seed
            assert (template.index, template.role) == (None, "template")
            assert request.messages is not None
            for place, report in zip(request.messages, of_messages, strict=True):
                assert (report.index, report.role) == (place.index, place.role)
                within = set(range(place.start, place.stop))
                assert report.tokens == len(within)
                expected = within & set(kept) if positions is not None else within
                assert report.kept_tokens == len(expected)
                assert report.protected_tokens == len(within & firm)


def test_a_plain_prompt_has_no_messages_and_an_unknown_chat_only_the_template() -> None:
    request = drawn_request(random.Random(1), protects=False)
    num_tokens = len(request.prompt_ids)
    no_chat = Request(
        request_id="r",
        prompt_ids=request.prompt_ids,
        sampling=request.sampling,
        filter=request.filter,
    )
    assert report_messages(no_chat, [0]) is None
    unknown = Request(
        request_id="r",
        prompt_ids=request.prompt_ids,
        sampling=request.sampling,
        filter=request.filter,
        messages=(),
    )
    (template,) = report_messages(unknown, [0]) or ()
    assert (template.role, template.tokens, template.kept_tokens) == ("template", num_tokens, 1)
