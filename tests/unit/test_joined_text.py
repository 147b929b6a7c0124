"""The text that is read: kept passages, and what separates them."""

from __future__ import annotations

import numpy as np

from gemserve.contract.prompt_parts import NO_SEPARATORS, EnclosingLines, Separators, TextBreaks
from gemserve.filtering.joined_text import Gaps, join_text
from gemserve.filtering.word_ranks import fused, word_scores

SEPARATORS = Separators(blank_line=(900, 901), line_end=(910,))
TOKENS = np.arange(100)
BREAKS = TextBreaks(paragraphs=(10, 20, 30, 40, 60), lines=(10, 20, 25, 30, 40, 60))
DOCUMENT = np.ones(100, dtype=np.bool_)


def joined(*ranges: tuple[int, int], separators: Separators = SEPARATORS) -> list[int]:
    positions = [p for start, stop in ranges for p in range(start, stop)]
    text = join_text(TOKENS, positions, Gaps(BREAKS, DOCUMENT, separators))
    kept = [token for at, token in enumerate(text.ids) if at not in text.added]
    assert kept == positions, "nothing of the prompt is lost or moved"
    assert all(text.ids[at] >= 900 for at in text.added)
    return text.ids


def test_neighbours_are_not_separated() -> None:
    assert joined((10, 20), (20, 30)) == list(range(10, 30))


def test_a_passage_that_ends_within_a_paragraph_is_separated_from_the_next() -> None:
    assert joined((10, 15), (60, 62)) == [10, 11, 12, 13, 14, 900, 901, 60, 61]


def test_a_paragraph_has_its_blank_line_and_a_line_its_end() -> None:
    assert joined((18, 20), (60, 62)) == [18, 19, 60, 61]
    assert joined((23, 25), (60, 62)) == [23, 24, 910, 60, 61]


def test_what_is_always_read_has_line_ends_of_its_own() -> None:
    is_document = DOCUMENT.copy()
    is_document[:5] = is_document[95:] = False
    positions = [0, 1, 50, 51, 97]
    text = join_text(TOKENS, positions, Gaps(BREAKS, is_document, SEPARATORS))
    assert text.ids == positions
    assert text.added == ()


def test_nothing_is_added_without_separators() -> None:
    assert joined((10, 15), (60, 62), separators=NO_SEPARATORS) == [*range(10, 15), 60, 61]


def test_rare_words_count_more_and_long_passages_less() -> None:
    starts, free = np.array([0, 10, 20, 30]), np.array([10, 10, 10, 70])
    rare, common = np.array([12]), np.array([1, 2, 13, 31, 32])
    scores = word_scores([rare, common], starts, free)
    assert scores.argmax() == 1
    assert word_scores([common], starts, free)[0] > word_scores([common], starts, free)[3]
    assert (word_scores([np.array([5])], starts, free) > 0).tolist() == [True, False, False, False]


def test_a_common_word_says_nothing() -> None:
    """Words such as "the" put passages first if a question shares no other word with the text."""
    starts, free = np.arange(0, 500, 10), np.full(50, 10)
    of_a_fifth, of_more = starts[:10] + 1, starts[:11] + 1
    assert word_scores([of_a_fifth], starts, free)[:10].all()
    assert not word_scores([of_more], starts, free).any()
    alone = word_scores([of_a_fifth], starts, free)
    assert (word_scores([of_a_fifth, of_more], starts, free) == alone).all()
    # of a few passages three are no crowd
    assert word_scores([np.array([1, 11, 21])], starts[:4], free[:4])[:3].all()


def test_what_may_not_be_chosen_is_no_document() -> None:
    starts, free = np.array([0, 10, 20]), np.array([10, 0, 10])
    asked = np.array([3, 12, 13, 14])  # the question has its own words
    scores = word_scores([asked], starts, free)
    assert scores[1] == 0
    assert scores[0] > 0
    assert not word_scores([asked], starts, np.zeros(3, dtype=np.int64)).any()


def test_the_best_of_either_judge_come_first() -> None:
    attention, words = np.array([9.0, 1, 5, 0]), np.array([0.0, 7, 2, 0])
    best = fused(attention, words)
    assert set(np.argsort(-best)[:3].tolist()) == {0, 1, 2}
    assert best[3] == best.min()
    without = fused(attention, np.zeros(4))
    assert np.argsort(-without).tolist() == np.argsort(-attention).tolist()


def test_an_enclosing_line_is_the_line_before_what_it_encloses() -> None:
    """No blank line, and a line's end only where the tokens have none."""
    enclosing = EnclosingLines(
        starts=np.array([11, 40], dtype=np.uint32),
        line_starts=np.array([8, 0], dtype=np.uint32),
        line_stops=np.array([11, 0], dtype=np.uint32),
    )
    for with_line_end, lines, added in (([], (11, 25), 0), ([24], (25,), 0), ([], (25,), 1)):
        tokens = np.array(with_line_end, dtype=np.uint32)
        breaks = TextBreaks(lines=lines, with_line_end=tokens, enclosing=enclosing)
        first = 24 if with_line_end else 25
        gaps = Gaps(breaks, DOCUMENT, SEPARATORS)
        assert len(join_text(TOKENS, [8, 9, 10, first], gaps).added) == added
        assert gaps.num_between(10, 45) >= 1  # what it does not enclose


def test_indentation_with_a_line_end_is_half_a_separator() -> None:
    breaks = TextBreaks(
        paragraphs=(40,), lines=(20, 30, 40), with_line_end=np.array([29, 39], dtype=np.uint32)
    )
    gaps = Gaps(breaks, DOCUMENT, SEPARATORS)
    assert gaps.between(10, 29) == SEPARATORS.line_end
    assert gaps.between(10, 30) == SEPARATORS.blank_line
    assert gaps.between(19, 29) == gaps.between(10, 39) == ()
