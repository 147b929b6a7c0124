"""Which tokens a filter must keep when the budget cannot hold all that deserve it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gemserve.contract.prompt_parts import Priority, ProtectedRange
from gemserve.filtering.protected_budget import (
    always_read,
    count_always_read,
    protected_positions,
    reserve,
)
from gemserve.prompting.prompt import chat_prompt, text_prompt
from gemserve.prompting.protected import (
    LONGEST_QUESTION,
    QUESTION_HEAD,
    QUESTION_TAIL,
    plain_ranges,
    question_ranges,
)

BOS = ProtectedRange(0, 1, Priority.BOS)


def random_spans(rng: random.Random, num_tokens: int) -> list[ProtectedRange]:
    spans = [BOS]
    for _ in range(rng.randrange(8)):
        start, stop = sorted(rng.randrange(-3, num_tokens + 5) for _ in range(2))
        spans.append(ProtectedRange(start, stop, rng.choice(list(Priority)[1:])))
    return spans


def test_budget_and_order_hold_for_random_spans() -> None:
    for seed in range(500):
        rng = random.Random(seed)
        num_tokens, budget = rng.randrange(1, 80), rng.randrange(1, 100)
        spans = random_spans(rng, num_tokens)
        covered = {p for s in spans for p in range(max(0, s.start), min(s.stop, num_tokens))}
        chosen = protected_positions(spans, num_tokens, budget)
        firm = {p for s in spans if s.is_always_read for p in range(s.start, s.stop)} & covered
        assert len(chosen) == len(set(chosen)) <= min(budget, len(covered)), seed
        assert len(firm & set(chosen)) == min(budget, len(firm)), seed
        assert set(chosen) <= covered
        for span in spans:  # kept whole, or nothing that others do not protect, too
            others = {p for s in spans if s is not span for p in range(s.start, s.stop)}
            own = set(range(max(0, span.start), min(span.stop, num_tokens))) - others
            assert span.is_always_read or own & set(chosen) in (own, set()), seed
        assert chosen[0] == 0, "BOS is never dropped"
        best = {p: min(s.priority for s in spans if s.start <= p < s.stop) for p in covered}
        ranks = [best[p] for p in chosen]
        of_firm = [rank for rank in ranks if rank <= Priority.FRAME]
        assert ranks[: len(of_firm)] == sorted(of_firm), seed


def test_what_is_protected_leaves_room_for_what_is_found() -> None:
    """A system prompt, tool results or a hundred turns used up the budget: the filter was blind.

    They are outside of it, and the ends of documents take a quarter.
    """
    long = 10_000
    question = ProtectedRange(long - 20, long, Priority.QUESTION)
    for priority in Priority:
        spans = [BOS, ProtectedRange(1, 5000, priority), question]
        reserved = reserve(spans, long, 400)
        is_firm = priority <= Priority.FRAME
        assert len(reserved.firm) == (5020 if is_firm else 21)
        assert not reserved.rest, "more than a quarter"
        fits = reserve([BOS, ProtectedRange(1, 101, priority), question], long, 400)
        assert len(fits.rest) == (0 if is_firm else 100)
        assert {0, *range(long - 20, long)} <= set(reserved.firm)
        assert not set(reserved.firm) & set(reserved.rest)
    everything = [
        BOS,
        ProtectedRange(1, 101, Priority.SYSTEM),
        ProtectedRange(200, 300, Priority.HEAD),
        ProtectedRange(400, 9000, Priority.HEAD),
        question,
    ]
    reserved = reserve(everything, long, 400)
    assert set(reserved.firm) == set(range(101)) | set(range(long - 20, long))
    assert sorted(reserved.rest) == [*range(200, 300)], "a quarter, whatever is always read"
    asked = reserve([ProtectedRange(0, 900, Priority.QUESTION)], long, 400)
    assert (asked.firm, asked.rest) == (list(range(899, -1, -1)), [])


def test_what_is_always_read_is_counted_without_being_listed() -> None:
    """A count that differed from the list by one made a budget that the filter could not meet."""
    for seed in range(2000):
        rng = random.Random(seed)
        num_tokens = rng.randrange(0, 60)
        spans = [
            ProtectedRange(
                rng.randrange(-10, 70), rng.randrange(-10, 80), rng.choice(list(Priority))
            )
            for _ in range(rng.randrange(9))
        ]
        listed = always_read(spans, num_tokens)
        firm = [s for s in spans if s.priority <= Priority.FRAME]
        covered = {p for s in firm for p in range(max(0, s.start), min(s.stop, num_tokens))}
        assert set(listed) == covered, seed
        assert len(listed) == len(covered) == count_always_read(spans, num_tokens), seed
        for start in (0, rng.randrange(70), num_tokens):
            behind = sum(position >= start for position in listed)
            assert count_always_read(spans, num_tokens, start) == behind, (seed, start)


def test_the_order_of_spans_does_not_matter() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        spans = random_spans(rng, 60)
        expected = protected_positions(spans, 60, 20)
        assert set(protected_positions(rng.sample(spans, len(spans)), 60, 20)) == set(expected)
        assert protected_positions([*spans, *spans], 60, 20) == expected


def test_protecting_the_protected_changes_nothing() -> None:
    for seed in range(100):
        rng = random.Random(seed)
        spans = random_spans(rng, 60)
        chosen = protected_positions(spans, 60, 20)
        again = [ProtectedRange(p, p + 1, Priority.HEAD) for p in chosen]
        assert sorted(protected_positions(again, 60, 20)) == sorted(chosen)


def test_a_smaller_budget_keeps_the_more_important() -> None:
    spans = [
        BOS,
        ProtectedRange(1, 5, Priority.SYSTEM),
        ProtectedRange(5, 8, Priority.TOOLS),
        ProtectedRange(8, 20, Priority.HEAD),
        ProtectedRange(20, 24, Priority.QUESTION),
    ]
    chosen = protected_positions(spans, 24, 24)
    assert chosen[:12] == [0, 23, 22, 21, 20, 4, 3, 2, 1, 7, 6, 5]
    for budget in range(24):
        assert protected_positions(spans, 24, budget) == chosen[: min(budget, 12)]


def test_a_beginning_that_does_not_fit_is_left_out() -> None:
    spans = [ProtectedRange(10, 20, Priority.BEFORE), ProtectedRange(1, 9, Priority.HEAD)]
    assert protected_positions(spans, 24, 17) == [*range(19, 9, -1)]
    assert protected_positions(spans, 24, 18) == [*range(19, 9, -1), *range(8, 0, -1)]


def test_a_question_too_long_for_the_budget_keeps_its_end() -> None:
    spans = [BOS, ProtectedRange(5, 50, Priority.QUESTION)]
    assert protected_positions(spans, 50, 4) == [0, 49, 48, 47]


@pytest.mark.parametrize(
    "spans", [[], [ProtectedRange(3, 3, Priority.SYSTEM)], [ProtectedRange(9, 4, Priority.HEAD)]]
)
def test_empty_spans_protect_nothing(spans: list[ProtectedRange]) -> None:
    assert protected_positions(spans, 20, 10) == []


def test_spans_beyond_the_prompt_are_cut() -> None:
    spans = [ProtectedRange(-5, 2, Priority.SYSTEM), ProtectedRange(8, 99, Priority.HEAD)]
    assert sorted(protected_positions(spans, 10, 10)) == [0, 1, 8, 9]


def test_a_short_question_is_protected_whole_and_a_document_at_its_ends() -> None:
    limit = QUESTION_HEAD + QUESTION_TAIL
    assert question_ranges(7, 7 + limit) == [ProtectedRange(7, 7 + limit, Priority.QUESTION)]
    stop = 500
    question, before, of_head = Priority.QUESTION, Priority.BEFORE, Priority.HEAD
    head = ProtectedRange(7, 7 + QUESTION_HEAD, of_head)
    end = ProtectedRange(stop - 32, stop, question)
    # a short question, and what stands before it as far as all are short
    for paragraphs, first in (
        ([480], 480),
        ([480, 460, 436, 435], 436),
        ([480, 430], 480),
        ([436, 435], 436),
    ):
        asked = paragraphs[0]
        expected = [
            ProtectedRange(asked, stop, question),
            ProtectedRange(first, asked, before),
            head,
        ]
        assert question_ranges(7, stop, paragraphs) == expected
    # a long one
    for asked in (435, stop - LONGEST_QUESTION):
        expected = [ProtectedRange(asked, stop, question), head]
        assert question_ranges(7, stop, [asked, asked - 9]) == expected
    # none to be seen
    for paragraphs in ([], [stop - LONGEST_QUESTION - 1]):
        tail = ProtectedRange(stop - QUESTION_TAIL, stop - 32, Priority.END)
        assert question_ranges(7, stop, paragraphs) == [end, head, tail]
    # what is short is for the caller to say
    assert question_ranges(7, stop, [480], short=stop - 7) == [ProtectedRange(7, stop, question)]
    assert len(question_ranges(7, stop, [480], short=stop - 8)) == 3


@pytest.mark.parametrize("num_tokens", [1, QUESTION_TAIL, 1000])
@pytest.mark.parametrize("has_bos", [True, False])
def test_a_plain_prompt_keeps_bos_and_its_ends(num_tokens: int, has_bos: bool) -> None:
    chosen = protected_positions(plain_ranges(num_tokens, has_bos), num_tokens, num_tokens)
    is_short = num_tokens <= QUESTION_HEAD + QUESTION_TAIL
    tail = range(0 if is_short else num_tokens - QUESTION_TAIL, num_tokens)
    head = range(min(num_tokens, QUESTION_HEAD + has_bos))
    assert set(chosen) == {*head, *tail}


PARAGRAPH = "The river runs past the houses, they say; nobody counts them. " * 3


@pytest.mark.parametrize("kind", ["chat", "text"])
def test_a_question_in_front_comes_before_the_end_of_its_document(
    tokenizer: Any, kind: str
) -> None:
    """The document's last paragraph took the whole budget, and the question was dropped."""
    question = "What is the code for the lantern?"
    content = "\n\n".join([question, *[PARAGRAPH.strip()] * 30])
    if kind == "chat":
        prompt = chat_prompt(tokenizer, [{"role": "user", "content": content}])
    else:
        prompt = text_prompt(tokenizer, f"{content}\n\nAnswer:")
    kept = reserve(prompt.protected, len(prompt.ids), 36).firm
    ((start, stop),) = prompt.question
    assert start < 16
    assert set(range(start, stop)) <= set(kept)
    assert len(prompt.ids) - 1 in kept


def test_a_blank_line_of_two_characters_each_is_kept_whole(tokenizer: Any) -> None:
    """Half of the blank line before the question was kept where lines end in CR LF."""
    content = f"{PARAGRAPH * 12}\r\n\r\nWhat is the code for the lantern?"
    prompt = chat_prompt(tokenizer, [{"role": "user", "content": content}])
    kept = reserve(prompt.protected, len(prompt.ids), 64).firm
    ((start, _),) = prompt.question
    blank = prompt.text.index("\r\n\r\nWhat")
    first = next(i for i, (low, _) in enumerate(prompt.offsets) if low >= blank)
    assert first < start
    assert set(range(first, start)) <= set(kept)
