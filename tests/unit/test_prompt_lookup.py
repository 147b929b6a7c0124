"""Prompt-lookup decoding: what is proposed, and whether that is worth its rows."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random

from gemserve.engine.memory import KVPlace
from gemserve.engine.scheduling.prompt_lookup import MOST_PROPOSED, MOST_ROWS, PromptLookup
from gemserve.engine.sequence.sequence import LiveSequence
from gemserve.engine.sequence.step_plan import DecodeRow
from gemserve.engine.sequence.text_index import TextIndex
from tests.unit import test_scheduler

ENDS = frozenset({2})


def sequence(
    order: int, ids: Sequence[int], generated: Sequence[int], max_tokens: int = 4000
) -> LiveSequence:
    made = test_scheduler.sequence(order, len(ids), None, max_tokens)
    made.ids, made.generated = ids, list(generated)
    made.text_index = TextIndex()
    return made


def row_of(s: LiveSequence) -> DecodeRow:
    return DecodeRow(s.order, s.generated[-1], s.next_slot, s.next_slot, 0, KVPlace(0, 500))


def found(
    ids: Sequence[int], generated: Sequence[int], most: int = MOST_PROPOSED
) -> tuple[int, ...]:
    index = TextIndex()
    index.look(ids, generated, most, ENDS)
    return index.found


def test_what_followed_the_newest_tokens_is_found() -> None:
    assert found([10, 11, 12, 13, 14, 15], [10, 11, 12]) == (13, 14, 15, 10, 11, 12)
    assert found([10, 11, 12, 13, 14, 15], [10, 11, 12], most=2) == (13, 14)
    assert found([10, 11, 12, 13, 14, 15], [9, 11, 12]) == (13, 14, 15, 9, 11, 12)
    assert found([10, 11, 12, 13, 14, 15], [9, 12]) == ()
    assert found([10], [11]) == ()


def test_the_last_of_several_places_counts() -> None:
    assert found([1, 3, 4, 5, 1, 3, 4, 6, 8], [1, 3, 4], most=1) == (6,)


def test_more_common_tokens_count_more_than_fewer() -> None:
    assert found([1, 3, 4, 5, 6, 3, 4, 7, 8], [1, 3, 4], most=1) == (5,)
    assert found([9, 1, 3, 4, 5, 1, 3, 4, 7, 8], [9, 1, 3, 4], most=1) == (5,)
    long = [*range(20, 40)]
    assert found([*long, 7, *long[8:], 8], long, most=1) == (7,)


def test_how_often_the_text_was_right_is_known_by_common_tokens() -> None:
    index = TextIndex()
    index.look([9, 10, 1, 10, 11, 12, 13], [9, 10], 1, ENDS)
    few = index.rate
    index.learn([5], 1)
    assert index.rate < few
    many = TextIndex()
    many.look([*range(30, 50), 51], [*range(30, 50)], 1, ENDS)
    assert many.rate > few
    many.learn([51], 1)
    assert many.rate > few


def test_an_answer_s_end_is_not_proposed() -> None:
    """Rows behind an end would be computed in vain, and a grammar allows nothing there."""
    assert found([10, 11, 12, 13, 2, 15], [10, 11, 12]) == (13,)


def test_an_answer_that_repeats_itself_is_found() -> None:
    index = TextIndex()
    answer = [20, 21, 22, 23]
    index.look([7, 8], answer, 3, ENDS)
    assert index.found == ()
    answer += [20, 21, 22]
    index.look([7, 8], answer, 3, ENDS)
    assert index.found == (23, 20, 21)


def proposing(
    lookup: PromptLookup,
    sequences: Sequence[LiveSequence],
    row_s: float,
    is_right: bool,
    steps: int = 30,
) -> list[int]:
    """How many rows each step had. A step takes a second, and `row_s` for each row but the first.

    The sequences' text comes again, or never does what it did before.
    """
    counts = []
    for step in range(steps):
        rows = lookup.propose([row_of(s) for s in sequences], sequences)
        num_rows = sum(1 + len(row.proposed) for row in rows)
        counts.append(num_rows)
        drawn = {}
        for s, row in zip(sequences, rows, strict=True):
            count = len(row.proposed)
            start = len(s.generated) % len(s.ids)
            right = [s.ids[(start + i) % len(s.ids)] for i in range(count + 1)]
            # the same two tokens, and then a new one
            wrong = [[s.ids[0], s.ids[1], 1000 + step][len(s.generated) % 3]]
            drawn[s.order] = right if is_right else wrong
        by_order = {s.order: s for s in sequences}
        lookup.learn(rows, drawn, by_order, 1.0 + row_s * (num_rows - 1))
        for s in sequences:
            s.generated += drawn[s.order]
    return counts


def test_nothing_is_proposed_before_a_step_was_timed() -> None:
    text = [*range(100, 130)]
    one = sequence(0, text, text[:3])
    assert proposing(PromptLookup(ENDS), [one], 0.1, is_right=True, steps=1) == [1]


def test_a_text_that_comes_again_is_proposed_ever_longer() -> None:
    text = [*range(100, 130)]
    counts = proposing(PromptLookup(ENDS), [sequence(0, text, text[:3])], 0.1, is_right=True)
    assert counts[0] == 1
    assert 1 < counts[1] < counts[-1] == 1 + MOST_PROPOSED


def test_a_text_that_misleads_is_not_proposed_for_long() -> None:
    text = [*range(100, 130)]
    one = sequence(0, text, text[:3])
    counts = proposing(PromptLookup(ENDS), [one], 0.1, is_right=False, steps=200)
    assert sum(counts[-100:]) - 100 <= 5


def test_a_text_that_no_longer_misleads_is_proposed_again() -> None:
    """What was not proposed is compared with what comes, which costs nothing."""
    text = [*range(100, 130)]
    one = sequence(0, text, text[:3])
    lookup = PromptLookup(ENDS)
    before = proposing(lookup, [one], 0.3, is_right=False, steps=200)
    assert before[-1] == 1
    one.generated += text[: -len(one.generated) % len(text)]  # so that the text begins anew
    assert proposing(lookup, [one], 0.3, is_right=True, steps=90)[-1] > 3


def test_rows_that_cost_as_much_as_steps_are_not_proposed() -> None:
    text = [*range(100, 130)]
    counts = proposing(PromptLookup(ENDS), [sequence(0, text, text[:3])], 1.0, is_right=True)
    assert sum(counts[-10:]) == 10


def test_many_sequences_leave_no_room() -> None:
    """Beside others a token is worth less, because a step has one of each sequence anyway."""
    text = [*range(100, 130)]
    sequences = [sequence(order, text, text[:3]) for order in range(MOST_ROWS + 3)]
    counts = proposing(PromptLookup(ENDS, is_forced=True), sequences, 0.1, is_right=True, steps=3)
    assert counts == [len(sequences)] * 3
    counts = proposing(PromptLookup(ENDS, is_forced=True), sequences[:20], 0.1, is_right=True)
    assert max(counts) <= MOST_ROWS


def test_an_answer_never_gets_longer_than_it_may() -> None:
    text = [*range(100, 130)]
    for left in range(1, 5):
        one = sequence(0, text, text[:3], max_tokens=3 + left)
        (row,) = PromptLookup(ENDS, is_forced=True).propose([row_of(one)], [one])
        assert len(row.proposed) == left - 1


def test_sequences_that_propose_nothing_stay_as_they_are() -> None:
    one = sequence(0, [5, 6, 7, 8], [5, 6, 7])
    one.text_index = None
    rows = PromptLookup(ENDS, is_forced=True).propose([row_of(one)], [one])
    assert rows == (row_of(one),)


def test_random_texts_propose_only_what_stands_in_them() -> None:
    rng = Random(0)
    for _ in range(300):
        ids = [rng.randrange(3, 7) for _ in range(rng.randrange(1, 40))]
        generated = [rng.randrange(3, 7) for _ in range(rng.randrange(1, 20))]
        index = TextIndex()
        for count in range(1, len(generated) + 1):
            index.look(ids, generated[:count], 5, ENDS)
            whole = [*ids, *generated[:count]]
            places = [
                at
                for size in range(2, 17)
                for at in range(size, len(whole))
                if whole[at - size : at] == whole[-size:]
            ]
            assert list(index.found) == (whole[places[-1] : places[-1] + 5] if places else [])
