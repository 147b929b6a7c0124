"""One place decides how a prompt is filtered: options resolved, and the plan that follows."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from gemserve.calibration.files import Calibration
from gemserve.config import DEFAULT_KEEP
from gemserve.contract.filter_options import (
    AUTO_MIN_KEEP,
    FilterMethod,
    FilterOptions,
    FilterParams,
)
from gemserve.contract.filter_plan import Budget, FilterPlan
from gemserve.contract.prompt_parts import Priority, ProtectedRange
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.errors import RequestError
from gemserve.filtering.methods import METHODS, SERVED_METHODS
from gemserve.filtering.planner import FilterPlanner
from gemserve.filtering.reading_plans import ReaderPlans
from tests.fakes import SHAPE

GUESSED = Calibration(layer=3)
MEASURED = Calibration(
    layer=3, heads=((1, 0), (3, 2)), ends_with=False, coverage_bound=0.4, is_measured=True
)
PLANNER = FilterPlanner(
    method="sieve",
    keep=64,
    min_tokens=200,
    segment_size="auto",
    reads_cached_whole=True,
    fails_open=False,
    calibration=MEASURED,
    sliding_windows=(100, None, None, None, 100),
    shape=replace(SHAPE, num_heads=4),
    context_tokens=4000,
    longest_sequence=3000,
    longest_prompt=1 << 20,
    longest_pass=1 << 20,
)
FULL = replace(PLANNER, sliding_windows=(None,) * 5)
SIEVE = FilterParams(method="sieve", keep=64)
NUM_TOKENS = 1000
AT_END = ((980, 990), (992, 996))


def request(
    params: FilterParams = SIEVE,
    num_tokens: int = NUM_TOKENS,
    question: tuple[tuple[int, int], ...] = AT_END,
    **more: Any,
) -> Request:
    return Request(
        request_id="r",
        prompt_ids=range(5, 5 + num_tokens),
        sampling=more.pop("sampling", SamplingParams(max_tokens=10)),
        filter=params,
        question=question,
        **more,
    )


def refused(options: FilterOptions, planner: FilterPlanner = PLANNER) -> tuple[str, str | None]:
    with pytest.raises(RequestError) as caught:
        planner.resolve(options)
    return str(caught.value), caught.value.param


def test_what_a_request_does_not_say_is_the_servers() -> None:
    params = PLANNER.resolve(FilterOptions())
    assert params == FilterParams(
        method="sieve", keep=64, fallback=True, layer=3, lexical="auto", may_read_whole=True
    )
    others = FilterOptions(keep=0.25, layer=1, return_selection=True)
    assert PLANNER.resolve(others) == FilterParams(
        method="sieve", keep=0.25, layer=1, lexical="auto", return_selection=True
    )
    unworded = PLANNER.resolve(FilterOptions(lexical="off"))
    assert unworded == FilterParams(method="sieve", keep=64, fallback=True, layer=3)
    headed = PLANNER.resolve(FilterOptions(heads=((2, 0), (0, 3)), layer=2))
    assert headed == FilterParams(
        method="sieve", keep=64, layer=2, heads=((2, 0), (0, 3)), lexical="auto"
    )
    pooled = PLANNER.resolve(FilterOptions(method="gemfilter", pooling="max"))
    assert pooled == FilterParams(method="gemfilter", keep=64, layer=3, pooling="max")


@pytest.mark.parametrize(
    ("calibration", "options", "falls_back"),
    [
        (MEASURED, FilterOptions(), True),
        (MEASURED, FilterOptions(fallback=False), False),
        (MEASURED, FilterOptions(layer=2), False),
        (MEASURED, FilterOptions(layer=3), True),
        (MEASURED, FilterOptions(heads=((3, 2), (1, 0))), True),
        (MEASURED, FilterOptions(heads=((1, 0),)), False),
        (MEASURED, FilterOptions(heads=((1, 0),), keep="auto"), True),
        (MEASURED, FilterOptions(method="gemfilter"), False),
        (MEASURED, FilterOptions(method="none"), False),
        (GUESSED, FilterOptions(), False),
        (GUESSED, FilterOptions(fallback=True), True),
        (GUESSED, FilterOptions(keep="auto"), True),
        (GUESSED, FilterOptions(keep="auto", fallback=False), False),
    ],
)
def test_only_a_measured_bound_falls_back_unasked(
    calibration: Calibration, options: FilterOptions, falls_back: bool
) -> None:
    """A guessed bound let half of all prompts be read whole; without one, misses went unsaid."""
    planner = replace(PLANNER, calibration=calibration)
    assert planner.resolve(options).fallback is falls_back


def test_auto_of_the_server_is_not_for_methods_that_cannot_tell() -> None:
    """A server that keeps "auto" refused every request for another method."""
    planner = replace(PLANNER, keep="auto")
    assert planner.resolve(FilterOptions()).keep == "auto"
    assert planner.resolve(FilterOptions(method="gemfilter")).keep == 1024
    assert planner.resolve(FilterOptions(method="position")).keep == 1024
    assert planner.resolve(FilterOptions(method="none")).keep == "auto"


def test_what_a_method_does_not_have_is_named() -> None:
    assert refused(FilterOptions(pooling="max")) == (
        "filter.pooling=max: only method gemfilter has it, not sieve",
        "filter.pooling",
    )
    assert refused(FilterOptions(layer=4)) == (
        "filter.layer=4: must be from 0 to this server's filter layer, 3",
        "filter.layer",
    )
    assert refused(FilterOptions(method="none", fallback=True)) == (
        "filter.fallback=true: method none keeps everything",
        "filter.fallback",
    )
    for method in ("gemfilter", "snapkv", "position", "random"):
        assert refused(FilterOptions(method=method, keep="auto")) == (
            f'filter.keep="auto": only method sieve has it, not {method}',
            "filter.keep",
        )
        assert refused(FilterOptions(method=method, fallback=True)) == (
            f"filter.fallback=true: only method sieve has it, not {method}",
            "filter.fallback",
        )
    for method in ("none", "snapkv", "position", "random"):
        message, param = refused(FilterOptions(method=method, layer=1))
        assert param == "filter.layer"
        assert re.match(r"filter\.layer=1: only methods sieve(,| and) gemfilter.* have", message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"heads": ()}, "filter.heads=(): must be a list of 1 to 32 pairs [layer, head] of whole "),
        ({"heads": ((0, -1),)}, "filter.heads=((0, -1),): must be a list of 1 to 32 pairs"),
        ({"heads": ((1, 2),) * 33}, "filter.heads: has 33 pairs, the limit is 32"),
        (
            {"heads": ((1, 2), (0, 0), (1, 2))},
            "filter.heads: [1, 2] is there more than once; the limit is once",
        ),
        (
            {"heads": ((0, 0), (4, 0))},
            "filter.heads: layer 4 must be from 0 to the request's filter layer, 3",
        ),
        (
            {"heads": ((3, 0),), "layer": 2},
            "filter.heads: layer 3 must be from 0 to the request's filter layer, 2",
        ),
        ({"heads": ((2, 4),)}, "filter.heads: head 4 of layer 2 must be from 0 to 3"),
        *(
            (
                {"heads": ((1, 0), (3, 2)), "method": method},
                f"filter.heads=[[1, 0], [3, 2]]: only method sieve has it, not {method}",
            )
            for method in METHODS
            if method != "sieve"
        ),
    ],
)
def test_heads_that_are_not_there_are_named(options: dict[str, Any], message: str) -> None:
    """A head of a layer above the filter layer would be looked for where nothing was recorded."""
    told, param = refused(FilterOptions(**options))
    assert told.startswith(message)
    assert param == "filter.heads"


def test_a_method_that_does_not_exist_is_named() -> None:
    """A name is plain text, so that a wrong one was a KeyError somewhere."""
    expected = (
        f"filter.method='best': must be one of {', '.join(SERVED_METHODS)}",
        "filter.method",
    )
    assert refused(FilterOptions(method="best")) == expected
    with pytest.raises(RequestError, match="must be one of none, "):
        PLANNER.plan(request(FilterParams(method="best", keep=64)))


def test_a_layer_that_does_not_see_the_start_is_named_before_the_queue() -> None:
    PLANNER.check_layer_sees(SIEVE, (), NUM_TOKENS)
    low = replace(SIEVE, layer=0)
    with pytest.raises(RequestError, match=r"filter\.layer=0: .* only the last 100 .* of 1000"):
        PLANNER.check_layer_sees(low, (), NUM_TOKENS)
    PLANNER.check_layer_sees(low, (), 200)  # too short to be filtered
    PLANNER.check_layer_sees(FilterParams(method="none", keep=16, layer=0), (), NUM_TOKENS)
    headed = replace(SIEVE, heads=((1, 0), (0, 2)))
    with pytest.raises(RequestError, match=r"filter\.heads: layer 0 .* last 100 .* of 1000"):
        PLANNER.check_layer_sees(headed, (), NUM_TOKENS)
    PLANNER.check_layer_sees(headed, (), 200)


def test_a_large_window_is_no_segment_where_the_prompt_is_read_as_one_sequence() -> None:
    """A layer that sees a segment was taken for one that sees the prompt, and its pass failed."""
    planner = replace(PLANNER, sliding_windows=(900, None, None, None, 900))
    instructions = (ProtectedRange(0, 480, Priority.SYSTEM),)
    for options in ({"layer": 0}, {"heads": ((0, 1),)}):
        params = replace(SIEVE, window=640, **options)
        assert planner.plan(request(params, protected=instructions)).segments is None
        with pytest.raises(RequestError, match=r"only the last 900 tokens of a prompt of 1000"):
            planner.check_layer_sees(params, instructions, NUM_TOKENS)
        assert planner.plan(request(params)).segments is not None
        planner.check_layer_sees(params, (), NUM_TOKENS)
        mostly = (ProtectedRange(0, 980, Priority.SYSTEM),)
        assert planner.plan(request(params, protected=mostly)).reason == "mostly_protected"
        planner.check_layer_sees(params, mostly, NUM_TOKENS)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_has_one_way(method: FilterMethod) -> None:
    """A pass, a choice without one, or eviction; else a request would never end."""
    params = FilterParams(method=method, keep=64)
    plan = FULL.plan(request(params, protected=(ProtectedRange(0, 3, Priority.SYSTEM),)))
    if method == "none":
        assert (plan.reason, plan.num_kept, plan.layer) == ("disabled", NUM_TOKENS, None)
        return
    assert plan.reason is None
    always = 3 if METHODS[method].protects else 0
    assert {m for m in METHODS if METHODS[m].protects} == {"sieve", "position", "random"}
    kept = 64 + always
    assert plan.num_kept == kept
    assert plan.budget == Budget(low=kept, high=kept, limit=kept, protected=always)
    assert plan.budget.least_chosen == 64
    ways = (plan.layer is not None, plan.chosen is not None, plan.evicts)
    assert sum(ways) == 1
    assert plan.evicts == (method == "snapkv")
    assert (plan.chosen is not None) == (METHODS[method].blind is not None)
    if plan.chosen is not None:
        assert len(plan.chosen) == kept
        assert {0, 1, 2} <= set(plan.chosen)
    expected: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
        "sieve": ((*range(980, 990), *range(992, 996)), (1, 3)),
        "gemfilter": ((999,), (3,)),
        "fastkv": (tuple(range(992, 1000)), (3,)),
        "claa": (tuple(range(992, 1000)), (0, 1, 2, 3)),
    }
    has_layer = METHODS[method].selector is not None
    assert plan.layer == (3 if has_layer else None)
    assert bool(plan.rows) == bool(plan.tapped) == has_layer
    assert {method for method in METHODS if METHODS[method].selector is not None} >= {*expected}
    if method in expected:
        assert (plan.rows, plan.tapped) == expected[method]


def test_the_calibrated_heads_count_in_the_calibrated_layer_alone() -> None:
    """Heads of another layer would be looked for where they were not recorded."""
    plan = PLANNER.plan(request())
    assert (plan.heads, plan.coverage_bound) == (((1, 0), (3, 2)), 0.4)
    same = PLANNER.plan(request(replace(SIEVE, layer=3)))
    assert same == plan
    lower = PLANNER.plan(request(replace(SIEVE, layer=2)))
    assert (lower.layer, lower.tapped, lower.heads) == (2, (2,), None)
    assert lower.coverage_bound == Calibration.GUESSED_BOUND


def test_heads_of_the_request_replace_those_of_the_calibration() -> None:
    """Their bound is measured only if they are the calibration's own, in whatever order."""
    heads = ((2, 1), (0, 3))
    plan = PLANNER.plan(request(replace(SIEVE, heads=heads)))
    assert (plan.layer, plan.tapped, plan.heads) == (3, (0, 2, 3), heads)
    assert plan.coverage_bound == Calibration.GUESSED_BOUND
    own = PLANNER.plan(request(replace(SIEVE, heads=((3, 2), (1, 0)))))
    assert (own.tapped, own.coverage_bound) == ((1, 3), 0.4)
    assert own == replace(PLANNER.plan(request()), heads=((3, 2), (1, 0)))
    lower = PLANNER.plan(request(replace(SIEVE, layer=2, heads=heads)))
    assert (lower.layer, lower.tapped, lower.heads) == (2, (0, 2), heads)
    guessed = replace(PLANNER, calibration=GUESSED)
    assert guessed.plan(request(replace(SIEVE, heads=heads))).heads == heads
    watched = PLANNER.plan(request(replace(SIEVE, heads=heads, return_attention=True)))
    assert (watched.answer_layer, watched.answer_heads) == (3, heads)


def test_rows_are_the_questions_and_the_ends_where_they_were_calibrated() -> None:
    asked = {*range(980, 990), *range(992, 996)}
    end = set(range(NUM_TOKENS - 16, NUM_TOKENS))
    assert set(PLANNER.plan(request()).rows) == asked
    both = replace(PLANNER, calibration=replace(MEASURED, ends_with=True))
    rows = both.plan(request()).rows
    assert set(rows) == asked | end
    assert list(rows) == sorted(set(rows))
    assert set(PLANNER.plan(request(question=())).rows) == end


@pytest.mark.parametrize("num_tokens", [1, 64, 199, 200])
def test_short_prompts_are_read_whole(num_tokens: int) -> None:
    plan = PLANNER.plan(request(num_tokens=num_tokens, question=()))
    assert (plan.reason, plan.num_kept, plan.layer) == ("short_prompt", num_tokens, None)
    assert PLANNER.generated_from(SIEVE, num_tokens, 0) == num_tokens
    assert PLANNER.generated_from(SIEVE, num_tokens, num_tokens) == num_tokens


def test_a_prompt_that_would_be_kept_whole_is_not_filtered() -> None:
    """The filter pass cost time, and everything was kept."""
    large = FilterParams(method="sieve", keep=NUM_TOKENS)
    assert PLANNER.plan(request(large)).reason == "short_prompt"
    assert PLANNER.plan(request(replace(large, keep=NUM_TOKENS - 1))).reason is None
    assert PLANNER.generated_from(large, NUM_TOKENS, 0) == NUM_TOKENS
    assert PLANNER.generated_from(SIEVE, NUM_TOKENS, 0) == 64
    assert PLANNER.generated_from(SIEVE, NUM_TOKENS, 100) == 164
    for method in ("gemfilter", "fastkv", "claa"):
        unprotected = FilterParams(method=method, keep=64)
        assert PLANNER.generated_from(unprotected, NUM_TOKENS, 100) == 64
    evicted = FilterParams(method="snapkv", keep=64)
    assert PLANNER.generated_from(evicted, NUM_TOKENS, 100) == NUM_TOKENS


def protecting(count: int, params: FilterParams, num_tokens: int = NUM_TOKENS) -> FilterPlan:
    """The plan of a prompt that begins with `count` tokens of instructions."""
    always = (ProtectedRange(0, count, Priority.SYSTEM),)
    return FULL.plan(request(params, num_tokens, protected=always))


def test_a_fraction_is_a_share_of_the_documents() -> None:
    """Of a chat that was mostly instructions, a tenth of all was as much as its document."""
    for method in ("sieve", "position", "random"):
        plan = protecting(400, FilterParams(method=method, keep=0.1))
        assert plan.budget == Budget(low=460, high=460, limit=460, protected=400)
        assert plan.num_kept == 460
    plan = protecting(400, FilterParams(method="gemfilter", keep=0.1))
    assert plan.budget == Budget(low=100, high=100, limit=100)
    auto = protecting(400, FilterParams(method="sieve", keep="auto"), 3600)
    assert auto.budget.protected == 400
    assert auto.budget.high == 400 + 400  # an eighth of 3,200
    assert auto.budget.least_chosen == AUTO_MIN_KEEP


@pytest.mark.parametrize("method", METHODS)
def test_a_prompt_that_is_mostly_protected_is_read_whole(method: FilterMethod) -> None:
    """Nothing was left to choose, or the filter pass cost more than it spared."""
    params = FilterParams(method=method, keep=64)
    plan = protecting(NUM_TOKENS - 64, params)
    if not METHODS[method].protects:
        assert plan.reason == ("disabled" if method == "none" else None)
        return
    assert (plan.reason, plan.num_kept) == ("mostly_protected", NUM_TOKENS)
    assert plan.budget.protected == NUM_TOKENS - 64
    assert (plan.layer, plan.chosen, plan.rows) == (None, None, ())
    assert FULL.generated_from(params, NUM_TOKENS, NUM_TOKENS - 64) == NUM_TOKENS
    assert protecting(NUM_TOKENS, params).reason == "mostly_protected"
    assert protecting(NUM_TOKENS, params, num_tokens=200).reason == "short_prompt"
    one_less = protecting(NUM_TOKENS - 65, params)
    # a choice that needs no pass spares a token; a pass would cost more than that
    expected = "mostly_protected" if METHODS[method].has_layer else None
    assert one_less.reason == expected


def test_a_pass_that_costs_more_than_it_spares_is_left_out() -> None:
    """The border is where a pass and the tokens it keeps are as much work as the whole prompt."""
    shape, layer = FULL.shape, MEASURED.layer
    whole = shape.prefill_chunk(0, NUM_TOKENS)

    def costs_more(kept: int) -> bool:
        return shape.filter_chunk(0, NUM_TOKENS, layer) + shape.prefill_chunk(0, kept) >= whole

    first = next(kept for kept in range(64, NUM_TOKENS) if costs_more(kept))
    assert 300 < first < NUM_TOKENS - 1
    for kept in (first - 1, first):
        plan = protecting(kept - 64, SIEVE)
        assert plan.reason == ("mostly_protected" if kept == first else None), kept
        assert plan.num_kept == (NUM_TOKENS if kept == first else kept)
        # whoever keeps as much by choice has said so, and nothing is protected
        assert protecting(0, replace(SIEVE, keep=kept)).reason is None


@pytest.mark.parametrize(
    ("min_tokens", "short"), [(0, 96), (16, 96), (96, 96), (97, 97), (512, 512)]
)
def test_what_is_short_as_a_prompt_is_a_short_message(min_tokens: int, short: int) -> None:
    """Of a last turn of 97 tokens the ends were kept, and its orders were not."""
    assert replace(PLANNER, min_tokens=min_tokens).short_message_tokens == short


def test_scored_prompts_are_read_whole() -> None:
    plan = PLANNER.plan(request(prompt_logprobs=0))
    assert (plan.reason, plan.num_kept) == ("prompt_logprobs", NUM_TOKENS)
    none = PLANNER.plan(request(FilterParams(method="none", keep=16), prompt_logprobs=0))
    assert none.reason == "disabled"


@pytest.mark.parametrize("method", METHODS)
def test_until_the_model_is_calibrated_prompts_are_read_whole(method: FilterMethod) -> None:
    """By the methods that need it, whatever the guessed layer sees."""
    guess = Calibration(layer=0, is_awaited=True)
    waiting = replace(PLANNER, calibration=guess)
    params = waiting.resolve(FilterOptions(method=method))
    assert params.awaits_calibration == METHODS[method].has_layer
    if method == "snapkv":  # not for a model with sliding windows
        return
    waiting.check_layer_sees(params, (), NUM_TOKENS)
    expected = "not_calibrated" if METHODS[method].has_layer else None
    expected = "disabled" if method == "none" else expected
    assert waiting.plan(request(params)).reason == expected
    assert FULL.plan(request(params)).reason == expected  # calibrated since the request came
    if METHODS[method].has_layer:
        assert waiting.plan(request(params, 200)).reason == "short_prompt"
        assert waiting.generated_from(params, NUM_TOKENS, 0) == NUM_TOKENS
        assert waiting.most_tokens(params, (), 3000) == waiting.longest_pass


def test_budgets() -> None:
    auto = PLANNER.plan(request(FilterParams(method="sieve", keep="auto", fallback=True)))
    assert auto.budget == Budget(low=AUTO_MIN_KEEP, high=128, limit=NUM_TOKENS, several=250)
    assert auto.num_kept == 128
    long = FilterParams(method="sieve", keep="auto")
    budget = PLANNER.plan(request(long, 3200)).budget
    assert budget == Budget(low=128, high=400, limit=800, several=800)
    falling = replace(SIEVE, fallback=True)
    # 3,000 tokens fit, less what is generated
    assert PLANNER.plan(request(falling, 3500)).budget.limit == 2990
    assert not PLANNER.plan(request()).fails_open
    opening = replace(PLANNER, fails_open=True)
    assert opening.plan(request()).fails_open
    assert not opening.plan(request(num_tokens=3500)).fails_open  # the whole does not fit


def in_front(planner: FilterPlanner = PLANNER, **more: Any) -> FilterPlan:
    return planner.plan(request(question=((3, 9), (11, 13)), **more))


def test_a_question_in_front_is_read_again_behind_the_prompt() -> None:
    """It cannot see what follows it: its rows looked at the template's first tokens."""
    plan = in_front()
    assert plan.repeated == (*range(8, 14), 16, 17)
    assert plan.rows == tuple(range(NUM_TOKENS, NUM_TOKENS + 8))
    with_end = in_front(replace(PLANNER, calibration=replace(MEASURED, ends_with=True)))
    assert with_end.rows == plan.rows  # what is read last is the question itself
    near = PLANNER.plan(request(question=((700, 745),)))
    assert (near.repeated, near.rows) == ((), tuple(range(700, 745)))
    assert PLANNER.plan(request(question=((700, 744),))).repeated
    assert in_front(num_tokens=200).repeated == ()  # not filtered
    for method in ("gemfilter", "fastkv", "claa"):
        other = in_front(params=FilterParams(method=method, keep=64))
        assert other.repeated == ()
        assert max(other.rows) == NUM_TOKENS - 1


def test_without_room_in_the_context_nothing_is_repeated() -> None:
    for context, is_repeated in ((NUM_TOKENS + 8, True), (NUM_TOKENS + 7, False)):
        plan = in_front(replace(PLANNER, context_tokens=context))
        assert bool(plan.repeated) == is_repeated
        if not is_repeated:
            assert plan.rows == (*range(3, 9), 11, 12)


@pytest.mark.parametrize("layer", [1, 3])
def test_a_pass_with_its_question_again_is_no_longer_than_watched_layers_see(layer: int) -> None:
    """The filter layer refused it: "sees only", for a prompt that it saw."""
    for seen, is_repeated in ((NUM_TOKENS + 8, True), (NUM_TOKENS + 7, False)):
        windows = tuple(seen if i == layer else None for i in range(5))
        assert bool(in_front(replace(FULL, sliding_windows=windows)).repeated) == is_repeated
    assert in_front().repeated  # what other layers see does not matter


def test_eviction_is_refused_where_layers_have_windows() -> None:
    """Kept keys are not where a window would look for them."""
    evicting = FilterParams(method="snapkv", keep=64)
    with pytest.raises(RequestError, match=r"filter\.method=snapkv: .* 2 of its .* last 100"):
        PLANNER.plan(request(evicting))
    assert FULL.plan(request(evicting)).evicts
    assert PLANNER.plan(request(evicting, 150, ())).reason == "short_prompt"


def test_a_plan_is_checked_like_a_request() -> None:
    """A request made without the API went on with a budget that its method ignores."""
    for params in (
        FilterParams(method="gemfilter", keep="auto"),
        FilterParams(method="position", keep=64, fallback=True),
    ):
        with pytest.raises(RequestError, match="only method sieve has it"):
            PLANNER.plan(request(params))
    with pytest.raises(RequestError, match="head 9 of layer 1"):
        PLANNER.plan(request(replace(SIEVE, heads=((1, 9),))))


def test_equal_requests_have_equal_plans() -> None:
    """Which thread plans, and when, must not matter."""
    sampling = SamplingParams(max_tokens=10, seed=5)
    for method in SERVED_METHODS:
        one = request(FilterParams(method=method, keep=64), sampling=sampling)
        assert FULL.plan(one) == FULL.plan(one)


def test_choices_share_a_plan_unless_their_seeds_choose() -> None:
    """Each choice planned anew; or all had the random tokens, or the prompt, of the first one."""
    for method in ("sieve", "random"):
        prompts = [request(FilterParams(method=method, keep=64), n) for n in (NUM_TOKENS, 900)]
        choices = [
            replace(one, sampling=SamplingParams(max_tokens=10, seed=seed))
            for one in prompts
            for seed in (1, 2)
        ]
        planned = FULL.planned_choices(choices)
        assert [one.plan for one in planned] == [FULL.plan(one) for one in choices]
        a, b, c, d = (id(one.plan) for one in planned)
        assert len({a, b, c, d}) == (4 if method == "random" else 2)
        assert method == "random" or (a, c) == (b, d)
        assert method != "random" or planned[0].plan != planned[1].plan


AUTO = FilterParams(method="sieve", keep="auto", fallback=True)
ANSWERED = replace(MEASURED, auto_keep=200)
ANSWERING = replace(FULL, calibration=ANSWERED)
LONG = 3500


def test_auto_keeps_no_more_than_the_model_answers_best_from() -> None:
    """An eighth of a long document distracts a small model."""
    plan = ANSWERING.plan(request(AUTO, LONG))
    assert FULL.plan(request(AUTO, LONG)).budget.high == 438
    # what is not trusted is not read whole either
    assert plan.budget == Budget(low=100, high=200, limit=875, several=875)
    assert plan.num_kept == 200
    assert ANSWERING.generated_from(AUTO, LONG, 0) == 200
    # a short document's eighth is less
    assert ANSWERING.plan(request(AUTO, NUM_TOKENS)).budget.high == AUTO_MIN_KEEP
    for keep, high in ((64, 64), (1024, 1024), (0.25, 875)):
        fixed = ANSWERING.plan(request(replace(SIEVE, keep=keep), LONG))
        assert fixed.budget == Budget(low=high, high=high, limit=high)


@pytest.mark.parametrize(
    ("auto_keep", "low", "high"),
    [(None, 128, 438), (16, 8, 16), (128, 64, 128), (256, 128, 256), (1024, 128, 438)],
)
def test_auto_keeps_at_least_half_of_what_it_may(
    auto_keep: int | None, low: int, high: int
) -> None:
    """Of a budget of 128 tokens, 128 were the least: all of it was always filled."""
    planner = replace(FULL, calibration=replace(ANSWERED, auto_keep=auto_keep))
    budget = planner.plan(request(replace(AUTO, fallback=False), LONG)).budget
    assert budget == Budget(low=low, high=high, limit=875, several=875)


@pytest.mark.parametrize(
    ("auto_keep", "distracts", "is_whole"),
    [(None, True, True), (1024, True, True), (512, True, False), (512, False, True)],
)
@pytest.mark.parametrize("fails_open", [True, False])
def test_only_a_model_that_more_tokens_distract_is_spared_all_of_them(
    auto_keep: int | None, distracts: bool, is_whole: bool, fails_open: bool
) -> None:
    """One that answers as well from few would have summarised the best passages alone."""
    calibration = replace(ANSWERED, auto_keep=auto_keep, more_distracts=distracts)
    planner = replace(FULL, calibration=calibration, fails_open=fails_open)
    plan = planner.plan(request(AUTO, 2000))
    assert plan.budget.limit == (2000 if is_whole else plan.budget.several)
    assert plan.fails_open == fails_open
    # who names a budget gets everything
    assert planner.plan(request(replace(AUTO, keep=100), 2000)).budget.limit == 2000


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "several"),
    [
        (2000, 10, 500),  # a quarter of the documents
        (20_000, 10, 2500),  # no less than what "auto" may keep anyway
        (8000, 10, 1024),
        (8000, 2500, 1000),  # what fits beside the answer would be less than that
        (2000, 2600, 400),
    ],
)
def test_several_passages_have_room(num_tokens: int, max_tokens: int, several: int) -> None:
    """A list was cut off after the passage or two that answer a single question best."""
    params = replace(AUTO, fallback=False)
    sampling = SamplingParams(max_tokens=max_tokens)
    budget = FULL.plan(request(params, num_tokens, sampling=sampling)).budget
    assert budget.several == budget.limit == several
    assert budget.high <= several


def test_for_another_model_auto_keeps_all_that_it_may() -> None:
    """Its reader finds less in few tokens than the model that answers does."""
    measured = replace(ANSWERED, auto_keep=256, more_distracts=False)
    own = replace(FULL, calibration=measured)
    reader = replace(FULL, calibration=replace(ANSWERED, auto_keep=128))
    plans = ReaderPlans.of(reader, own, None).planner
    assert plans.calibration.most_kept("auto", 4096) == 512
    assert plans.calibration.most_kept("auto", 100_000) == DEFAULT_KEEP
    budget = plans.plan(request(replace(AUTO, fallback=False), LONG)).budget
    assert budget == Budget(low=438, high=438, limit=875, several=875)
    few = replace(measured, auto_keep=128, more_distracts=True)
    plans = ReaderPlans.of(reader, replace(own, calibration=few), None).planner
    assert plans.calibration.most_kept("auto", 4096) == 128
    assert plans.plan(request(AUTO, LONG)).budget.low == 64


def test_what_is_always_read_is_not_part_of_what_auto_keeps() -> None:
    always = (ProtectedRange(0, 400, Priority.SYSTEM),)
    plan = ANSWERING.plan(request(AUTO, LONG, protected=always))
    assert plan.budget == Budget(low=500, high=600, limit=1175, several=1175, protected=400)
    assert plan.budget.least_chosen == 100
    assert ANSWERING.generated_from(AUTO, LONG, 400) == 600
