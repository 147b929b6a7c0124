"""Which kept passages an answer attended to: equal to eager attention, and without side effects."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gemserve.contract.events import Filtered, Finished, TextDelta
from gemserve.contract.filter_options import FilterOptions
from gemserve.contract.prompt_parts import TextBreaks
from gemserve.contract.requests import Request
from gemserve.contract.scores import MOST_LEANED, AnswerAttention
from gemserve.engine.core import Core
from gemserve.engine.running.answer_attention import EVERY, attention_of
from gemserve.errors import RequestError
from tests import models
from tests.model.test_query_rows import FOUND, core_of, ids_of, request

N = 400
BREAKS = TextBreaks(paragraphs=tuple(range(0, N, 28)))
NUM_DRAWN = 2 * EVERY + 5


def watched(seed: int = 1, **params: Any) -> Request:
    one = request(
        ids_of(N, seed),
        ((N - 20, N),),
        params={"return_attention": True, "layer": 2, **params},
        breaks=BREAKS,
    )
    return replace(one, sampling=replace(one.sampling, max_tokens=NUM_DRAWN))


def answer(core: Core, *given: Request) -> list[tuple[list[int], list[int], Finished]]:
    """Kept positions, drawn tokens and end of requests that run together."""
    jobs = [core.add(each) for each in given]
    kept: dict[Any, list[int]] = {}
    drawn: dict[Any, list[int]] = {job: [] for job in jobs}
    ends: dict[Any, Finished] = {}
    while not core.is_idle:
        for job, event in core.step():
            if isinstance(event, Filtered):
                assert event.report.selection is not None
                kept[job] = [p for a, b in event.report.selection for p in range(a, b)]
            elif isinstance(event, TextDelta):
                drawn[job] += event.token_ids
            elif isinstance(event, Finished):
                ends[job] = event
        core.check_integrity()
    return [(kept[job], drawn[job], ends[job]) for job in jobs]


def found_of(end: Finished) -> AnswerAttention:
    assert end.error is None
    assert end.attention is not None
    return end.attention


def eager(ids: list[int], heads: tuple[tuple[int, int], ...]) -> torch.Tensor:
    """The mean attention of the heads in transformers' own eager code: [rows, tokens]."""
    model = models.build("llama")
    model.set_attn_implementation("eager")
    with torch.inference_mode():
        attentions = model(torch.tensor([ids]), output_attentions=True).attentions
    return torch.stack([attentions[layer][0, head] for layer, head in heads]).mean(dim=0)


@pytest.mark.parametrize("method", ["sieve", "gemfilter", "position", "none"])
def test_it_is_the_attention_of_the_model(method: str) -> None:
    """A look at the wrong row, layer or slot would show passages that had no part in the answer."""
    one = watched(method=method)
    ((kept, drawn, end),) = answer(core_of(), one)
    found = found_of(end)
    assert found.heads == FOUND.heads
    assert len(found.tokens) == len(found.offsets) == len(drawn) == NUM_DRAWN
    read = [one.prompt_ids[p] for p in kept]
    attention = eager([*read, *drawn[:-1]], FOUND.heads)
    attention[:, 0] = 0
    for index, told in enumerate(found.tokens):
        row = attention[len(read) - 1 + index]
        totals = [
            (float(sum(row[slot] for slot, p in enumerate(kept) if start <= p < stop)))
            for start, stop in found.passages
        ]
        for passage, weight in told:
            assert weight == pytest.approx(totals[passage], abs=2e-4)
        best = sorted(totals, reverse=True)[: len(told)]
        assert [weight for _, weight in told] == pytest.approx(best, abs=2e-4)
        assert 0 < len(told) <= MOST_LEANED


def test_passages_lie_within_the_text_s_paragraphs() -> None:
    ((kept, _, end),) = answer(core_of(), watched())
    for start, stop in found_of(end).passages:
        assert start % 28 == 0 or start in BREAKS.paragraphs
        assert any(start <= p < stop for p in kept)


def test_asking_for_it_changes_no_answer() -> None:
    """A look that stored keys and values would change what is drawn after it."""
    for method in ("sieve", "none"):
        plain = watched(method=method, return_attention=False)
        ((_, expected, end),) = answer(core_of(), plain)
        assert end.attention is None
        ((_, drawn, _),) = answer(core_of(), watched(method=method))
        assert drawn == expected


def test_answers_beside_each_other_are_as_alone() -> None:
    core = core_of()
    together = answer(core, watched(1), watched(2), watched(3, return_attention=False))
    assert together[2][2].attention is None
    for seed, (_, drawn, end) in zip((1, 2), together, strict=False):
        ((_, alone, alone_end),) = answer(core_of(), watched(seed))
        assert drawn == alone
        ours, theirs = found_of(end), found_of(alone_end)
        for one, other in zip(ours.tokens, theirs.tokens, strict=True):
            assert [w for _, w in one] == pytest.approx([w for _, w in other], abs=2e-4)


def test_an_answer_of_one_token_has_one() -> None:
    one = watched()
    one = replace(one, sampling=replace(one.sampling, max_tokens=1))
    ((_, drawn, end),) = answer(core_of(), one)
    assert len(found_of(end).tokens) == len(drawn) == 1


def test_a_look_that_fails_ends_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """It ended one behind 15 tokens, for example where all layers have a sliding window."""
    core = core_of()

    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(type(core.model), "queries_of", fail)
    watched_end, plain_end = (
        end for _, _, end in answer(core, watched(1), watched(2, return_attention=False))
    )
    assert (watched_end.reason, watched_end.attention) == ("length", None)
    assert plain_end.reason == "length"
    assert core.internal_errors["answer_attention"] == 1


def test_an_answer_that_has_no_attention_in_the_end_is_counted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The client got null, and nobody else heard of it."""
    core = core_of()
    monkeypatch.setattr("gemserve.engine.running.runner.AnswerWatch.report", None)
    ((_, _, end),) = answer(core, watched(1))
    assert (end.reason, end.attention) == ("length", None)
    assert core.internal_errors["answer_attention"] == 1


def test_snapkv_has_none() -> None:
    """Its layers keep different tokens, so there are no kept passages."""
    core = core_of()
    options = FilterOptions(method="snapkv", return_attention=True)
    with pytest.raises(RequestError, match="return_attention"):
        core.planner.resolve(options)


def test_attention_is_causal_and_capped() -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(3, 8, generator=generator)
    keys = torch.randn(10, 8, generator=generator)
    attention = attention_of(query, keys, scale=2.0, softcap=1.5)
    assert torch.equal(attention[0, 8:], torch.zeros(2))
    logits = 1.5 * torch.tanh(query[2] @ keys.T * 2.0 / 1.5)
    torch.testing.assert_close(attention[2], logits.softmax(-1))
