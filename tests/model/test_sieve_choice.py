"""What sieve keeps of prompts whose attention is made by hand."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from gemserve.calibration.files import Calibration
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.filter_plan import Budget
from gemserve.contract.prompt_parts import Priority, ProtectedRange
from gemserve.filtering.gemfilter import GemFilter
from gemserve.filtering.protected_budget import count_always_read
from gemserve.filtering.selector import Choice, Evidence, LayerEvidence
from gemserve.filtering.sieve import Sieve
from gemserve.prompting.protected import plain_ranges
from gemserve_kernels import select_backend

NUM_TOKENS = 1024
PARAMS = FilterParams(method="sieve", keep="auto", fallback=True)
ALWAYS = 33  # of `evidence`: BOS, and the end, where the question may be


def budget_of(low: int, high: int, limit: int = NUM_TOKENS) -> Budget:
    """A budget of `low` to `high` tokens of documents; `limit` counts what is always read, too."""
    return Budget(low=low + ALWAYS, high=high + ALWAYS, limit=limit, protected=ALWAYS)


BUDGET = budget_of(64, 256)


def is_filled(choice: Choice, size: int, keep: int, *, is_auto: bool = True) -> bool:
    """Does it keep at most `size` tokens, with no room left for a passage of a budget of `keep`?

    `is_auto`: this is the most that "auto" keeps.
    """
    limit = Sieve().passage_limit(keep, whole=is_auto)
    return size - limit < len(choice.positions) <= size


def evidence(*spots: int, sharpness: float = 30.0) -> Evidence:
    """Two heads over random keys: the calibrated one looks at `spots`, the other everywhere."""
    generator = torch.Generator().manual_seed(0)
    keys = torch.randn(1, NUM_TOKENS, 32, generator=generator) * 0.05
    queries = torch.zeros(2, 16, 32)
    queries[0, :, 0] = sharpness
    keys[0, list(spots), 0] = 1.0
    layer = LayerEvidence(queries=queries, keys=keys, scale=1.0, softcap=None)
    return Evidence(
        num_tokens=NUM_TOKENS,
        layers={0: layer},
        rows=range(NUM_TOKENS - 16, NUM_TOKENS),
        backend=select_backend(keys.device),
        protected=plain_ranges(NUM_TOKENS, True),
        heads=((0, 0),),
        coverage_bound=Calibration.GUESSED_BOUND,
    )


def test_auto_keeps_little_where_attention_is_focused() -> None:
    budget = budget_of(17, 256)
    one = Sieve().choose(evidence(300), budget, PARAMS)
    many = [100, 300, 500, 700]
    several = Sieve().choose(evidence(*many), budget, PARAMS)
    for choice, spots in ((one, [300]), (several, many)):
        kept = choice.positions.tolist()
        assert not choice.is_diffuse
        assert choice.coverage is not None
        assert choice.coverage > 0.95
        assert set(spots) <= set(kept)
        assert budget.low <= len(kept) <= budget.high
        assert kept == sorted(set(kept))
    assert len(one.positions) < len(several.positions) < budget.high


def test_auto_keeps_whole_passages() -> None:
    """It kept the one token with most of the attention, and so half a number."""
    kept = set(Sieve().choose(evidence(700), BUDGET, PARAMS).positions.tolist())
    assert set(range(700 - 8, 700 + 9)) <= kept
    free = [p for p in kept if 0 < p < NUM_TOKENS - 64]
    assert len(free) >= BUDGET.least_chosen


def test_auto_leaves_out_what_is_hardly_looked_at() -> None:
    """A share of all attention let many weak passages in, behind the one that says the answer."""
    budget = budget_of(17, 256)
    assert count_always_read(evidence().protected, NUM_TOKENS) == ALWAYS
    for share, is_kept in ((0.4, True), (0.2, False)):
        found = evidence(300)
        found.layers[0].keys[0, 700, 0] = 1.0 + math.log(share) / 30.0
        kept = set(Sieve().choose(found, budget, PARAMS).positions.tolist())
        assert set(range(292, 309)) <= kept
        assert (700 in kept) == is_kept
        assert 1 not in kept, "the beginning does not fit into a quarter of the least"
        free = [p for p in kept if 0 < p < NUM_TOKENS - 64]
        assert len(free) == (34 if is_kept else 17)


@pytest.mark.parametrize("num_alike", [2, 3, 5])
def test_auto_keeps_all_passages_that_answer_alike(num_alike: int) -> None:
    """Of a list it kept the first two entries: more than one question is answered best from."""
    spots = [150 + 120 * i for i in range(num_alike)]
    found = evidence(*spots)
    for spot in spots[1:]:  # less than what "auto" wants of passages that words do not find
        found.layers[0].keys[0, spot, 0] = 1.0 + math.log(0.25) / 30.0
    words = (np.array(spots, dtype=np.uint32),)
    budget = replace(budget_of(17, 60), several=ALWAYS + 256)
    for words_of, is_list in ((words, num_alike >= Sieve().several), ((), False)):
        choice = Sieve().choose(replace(found, words=words_of), budget, PARAMS)
        kept = set(choice.positions.tolist())
        assert (set(spots) <= kept) == is_list
        assert (len(kept) > budget.high) == (is_list and num_alike > 3)
        assert len(kept) <= budget.several


def test_what_is_alike_is_cut_at_its_own_limit() -> None:
    spots = [150 + 120 * i for i in range(6)]
    found = replace(evidence(*spots), words=(np.array(spots, dtype=np.uint32),))
    budget = replace(budget_of(17, 60), several=ALWAYS + 64)
    choice = Sieve().choose(found, budget, PARAMS)
    assert budget.high - 17 < len(choice.positions) <= budget.several


def test_coverage_does_not_depend_on_the_budget() -> None:
    """A bound found at one budget was wrong at every other."""
    found, seen = evidence(*range(100, 900, 40), sharpness=8.0), set()
    for keep in (80, 128, 700):
        budget = budget_of(keep, keep, keep + ALWAYS)
        seen.add(Sieve().choose(found, budget, replace(PARAMS, fallback=False)).coverage)
    assert len(seen) == 1


def test_what_a_question_sees_in_itself_is_not_the_document() -> None:
    """It was counted as covered, and its neighbours ranked by it, before what it looks at."""
    asked = (
        ProtectedRange(0, 1, Priority.BOS),
        ProtectedRange(1008, NUM_TOKENS, Priority.QUESTION),
    )

    def looking_at_itself(*spots: int, sharpness: float) -> Evidence:
        found = replace(evidence(*spots, sharpness=sharpness), protected=asked)
        layer = found.layers[0]
        layer.keys[0, 1008, 1] = 1.0
        layer.queries[0, 0] = 0.0
        layer.queries[0, 0, 1] = 60.0
        return found

    spread = Sieve().choose(looking_at_itself(sharpness=0.0), BUDGET, PARAMS)
    assert spread.coverage == pytest.approx(1 / 16, abs=0.01)
    spots = range(100, 900, 60)  # as many as fit with their neighbours
    found = looking_at_itself(*spots, sharpness=2.5)  # 0.01 each: below 2% of 1
    kept = set(Sieve().choose(found, BUDGET, replace(PARAMS, fallback=False)).positions.tolist())
    seen = {p for spot in spots for p in range(spot - 8, spot + 9)}
    assert kept == {0, *seen, *range(1008, NUM_TOKENS)}
    found = looking_at_itself(300, sharpness=30.0)
    narrow = Budget(low=34, high=34, limit=34, protected=17)
    kept = set(Sieve().choose(found, narrow, replace(PARAMS, fallback=False)).positions.tolist())
    assert kept == {0, *range(292, 309), *range(1008, NUM_TOKENS)}


def test_the_bound_decides_what_is_trusted() -> None:
    """It was one number for all models; each calibration now brings its own."""
    found = evidence(*range(100, 900, 40))
    budget = budget_of(128, 128)
    reached = Sieve().choose(found, budget, replace(PARAMS, keep=128)).coverage
    assert reached is not None
    for bound, is_diffuse in ((reached - 0.01, False), (reached + 0.01, True)):
        choice = Sieve().choose(
            replace(found, coverage_bound=bound), budget, replace(PARAMS, keep=128)
        )
        assert (choice.is_diffuse, choice.coverage) == (is_diffuse, reached)


def test_a_head_that_rests_on_the_first_token_is_not_diffuse() -> None:
    """Most heads of large models do: what little they look at otherwise is what counts."""
    resting = evidence(700, sharpness=12.0)
    resting.layers[0].keys[0, 0, 0] = (
        1.04  # 12 · 1.04: 0.6 of the attention, the needle gets the rest
    )
    choice = Sieve().choose(resting, BUDGET, PARAMS)
    assert not choice.is_diffuse
    assert choice.coverage is not None
    assert choice.coverage > 0.9
    asleep = evidence(sharpness=60.0)  # nothing but the first token
    asleep.layers[0].keys[0, 0, 0] = 1.0
    assert Sieve().choose(asleep, BUDGET, PARAMS).is_diffuse


def test_a_question_longer_than_the_budget_leaves_all_of_it() -> None:
    """Nothing was chosen, and with a fallback asked for the answer came from the question alone."""
    length = NUM_TOKENS - 500
    question = replace(
        evidence(300), protected=(ProtectedRange(500, NUM_TOKENS, Priority.QUESTION),)
    )
    size = length + 64
    budget = Budget(low=size, high=size, limit=NUM_TOKENS, protected=length)
    for params in (PARAMS, replace(PARAMS, keep=64, fallback=False)):
        choice = Sieve().choose(question, budget, params)
        kept = choice.positions.tolist()
        assert not choice.is_diffuse
        assert is_filled(choice, size, 64)
        assert set(range(500, NUM_TOKENS)) <= set(kept)
        assert set(range(292, 309)) <= set(kept)
        assert choice.coverage is not None
        assert choice.coverage > 0.95


def test_a_budget_without_room_has_found_nothing() -> None:
    """It was trusted for what the question saw in itself."""
    question = replace(
        evidence(300), protected=(ProtectedRange(500, NUM_TOKENS, Priority.QUESTION),)
    )
    length = NUM_TOKENS - 500
    budget = Budget(low=length, high=length, limit=NUM_TOKENS, protected=length)
    choice = Sieve().choose(question, budget, PARAMS)
    assert (len(choice.positions), choice.coverage, choice.is_diffuse) == (NUM_TOKENS, 0.0, True)
    choice = Sieve().choose(question, budget, replace(PARAMS, keep=64, fallback=False))
    assert choice.positions.tolist() == list(range(500, NUM_TOKENS))
    assert (choice.coverage, choice.is_diffuse) == (0.0, False)


def test_nothing_is_called_widened_that_was_not() -> None:
    budget = budget_of(256, 256, 256 + ALWAYS)
    choice = Sieve().choose(evidence(sharpness=0.0), budget, PARAMS)
    assert not choice.is_diffuse
    assert is_filled(choice, 256 + ALWAYS, 256)


def test_diffuse_attention_keeps_what_fits() -> None:
    diffuse = evidence(sharpness=0.0)
    choice = Sieve().choose(diffuse, BUDGET, PARAMS)
    assert choice.is_diffuse
    assert choice.positions.tolist() == list(range(NUM_TOKENS))
    assert choice.coverage is not None
    assert choice.coverage < 0.5
    limited = Sieve().choose(diffuse, budget_of(64, 256, 600), PARAMS)
    assert limited.is_diffuse
    assert is_filled(limited, 600, 256)
    strict = FilterParams(method="sieve", keep="auto")
    choice = Sieve().choose(diffuse, budget_of(64, 256, 256 + ALWAYS), strict)
    assert not choice.is_diffuse
    assert 64 + ALWAYS <= len(choice.positions) <= 256 + ALWAYS


@pytest.mark.parametrize("keep", [16, 70, 256, 1000])
def test_a_fixed_budget_is_filled_with_passages(keep: int) -> None:
    keep = min(keep, NUM_TOKENS - ALWAYS)
    fixed = budget_of(keep, keep, keep + ALWAYS)
    choice = Sieve().choose(evidence(300), fixed, FilterParams(method="sieve", keep=keep))
    assert is_filled(choice, keep + ALWAYS, keep, is_auto=False)
    assert 300 in choice.positions.tolist()


@pytest.mark.parametrize("selector", [Sieve(), GemFilter()])
def test_scores_that_are_not_numbers_are_an_error(selector: Any) -> None:
    """They sorted somewhere: tokens were kept for no reason, and nobody heard of it."""
    broken = evidence(300)
    broken.layers[0].keys[0, 5] = torch.nan
    with pytest.raises(ValueError, match="not finite"):
        selector.choose(broken, Budget(low=32, high=32, limit=32), PARAMS)


def test_calls_do_not_make_a_choice_less_trusted() -> None:
    """Their rows look at more places than a clear question: a third of the loops fell back."""
    alone = evidence(300)
    layer = alone.layers[0]
    generator = torch.Generator().manual_seed(3)
    of_calls = torch.randn(layer.queries.shape, generator=generator) * 12
    queries = torch.cat([layer.queries, of_calls], dim=1)
    among = replace(
        alone,
        layers={0: replace(layer, queries=queries)},
        rows=range(NUM_TOKENS - 32, NUM_TOKENS),
    )
    coverages = [
        Sieve().choose(one, BUDGET, PARAMS).coverage or 0.0
        for one in (alone, among, replace(among, num_asked=16))
    ]
    assert coverages[1] < 0.9 * coverages[0]
    assert coverages[2] == pytest.approx(coverages[0], abs=0.02)
