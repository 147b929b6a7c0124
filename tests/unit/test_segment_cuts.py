"""Documents are cut by their content, so that a change is felt only where it is."""

from __future__ import annotations

from random import Random

import numpy as np
import pytest

from gemserve.contract.filter_plan import Segment
from gemserve.contract.prompt_parts import NO_BREAKS, Priority, ProtectedRange, TextBreaks
from gemserve.filtering.segment_cuts import cut_segments, document_ranges

SIZE = 2000


def text_of(rng: Random, num_tokens: int) -> list[int]:
    return [rng.randrange(49_000) for _ in range(num_tokens)]


def segments_of(
    ids: list[int], paragraphs: list[int] | None = None, size: int = SIZE, **options: object
) -> tuple[Segment, ...]:
    breaks = NO_BREAKS if paragraphs is None else TextBreaks(paragraphs=tuple(paragraphs))
    tokens = np.asarray(ids, dtype=np.int64)
    return cut_segments(tokens, [(0, len(ids))], breaks, size, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("num_tokens", [1, 1999, 2000, 2001, 50_000])
def test_segments_are_the_document_and_are_short_enough(num_tokens: int) -> None:
    ids = text_of(Random(num_tokens), num_tokens)
    segments = segments_of(ids)
    assert [w.start for w in segments] == [0, *(w.stop for w in segments[:-1])]
    assert segments[-1].stop == num_tokens
    assert all(w.stop - w.start <= SIZE for w in segments)
    assert len(segments) == 1 or min(w.stop - w.start for w in segments) >= SIZE // 4


def test_segments_begin_at_paragraphs() -> None:
    rng = Random(1)
    ids = text_of(rng, 30_000)
    paragraphs = sorted(rng.sample(range(1, 30_000), 300))
    assert {w.start for w in segments_of(ids, paragraphs)} <= {0, *paragraphs}


def test_an_inserted_line_changes_two_segments_at_most() -> None:
    changed = []
    for seed in range(40):
        rng = Random(seed)
        ids = text_of(rng, 40_000)
        paragraphs = sorted(rng.sample(range(1, 40_000), 500))
        at = 0 if seed % 2 else rng.choice(paragraphs)
        line = text_of(rng, rng.randrange(1, 60))
        behind = {p + len(line) for p in [*paragraphs, at] if p >= at}
        moved = sorted({p for p in paragraphs if p <= at} | behind)
        before = {w.name for w in segments_of(ids, paragraphs)}
        after = segments_of([*ids[:at], *line, *ids[at:]], moved)
        changed.append(sum(w.name not in before for w in after))
    assert sorted(changed)[-3] <= 2, "it may be three where the line is at a cut"
    assert sum(changed) <= 50


def test_a_longer_document_has_the_segments_of_its_beginning() -> None:
    rng = Random(5)
    ids = text_of(rng, 40_000)
    before = segments_of(ids)
    after = {w.name for w in segments_of([*ids, *text_of(rng, 10_000)])}
    assert sum(w.name not in after for w in before) <= 2


def test_names_are_of_the_anchor_and_the_tokens() -> None:
    ids = text_of(Random(2), 100)
    (one,), (same,) = segments_of(ids), segments_of(ids)
    (other,), (behind,) = segments_of([*ids[:-1], 1]), segments_of(ids, anchor=(7,))
    assert one.name == same.name
    assert len({one.name, other.name, behind.name}) == 3


@pytest.mark.parametrize("num_tokens", [300_000])
def test_one_repeated_word_is_cut_evenly(num_tokens: int) -> None:
    sizes = [w.stop - w.start for w in segments_of([5] * num_tokens)]
    assert max(sizes) <= SIZE
    assert min(sizes) > SIZE / 4


def test_documents_are_what_is_not_always_read() -> None:
    protected = (
        ProtectedRange(0, 100, Priority.SYSTEM),
        ProtectedRange(200, 210, Priority.FRAME),
        ProtectedRange(500, 510, Priority.FRAME),
        ProtectedRange(900, 1000, Priority.FRAME),
        ProtectedRange(990, 1100, Priority.QUESTION),
        ProtectedRange(1500, 1600, Priority.TAIL),
    )
    assert document_ranges(protected, ((1000, 1100),), 2000) == [
        (100, 500),
        (510, 900),
        (1100, 2000),
    ]
    assert document_ranges((), (), 50) == [(0, 50)]


def test_a_question_is_never_within_a_segment() -> None:
    protected = (ProtectedRange(500, 510, Priority.QUESTION),)
    assert document_ranges(protected, ((500, 510),), 900) == [(0, 500), (510, 900)]


def test_what_a_library_has_cut_stays_as_it_was() -> None:
    """Also longer than a segment, and without the few tokens between two; the rest is cut anew."""
    tokens = np.array(text_of(Random(3), 1000))
    fixed = [(100, 420), (422, 500), (500, 510)]
    segments = cut_segments(tokens, [(0, 1000)], NO_BREAKS, 256, (), fixed)
    found = [(segment.start, segment.stop) for segment in segments]
    assert found[:4] == [(0, 100), *fixed]
    assert found[4][0] == 510
    assert found[-1][1] == 1000
    assert max(stop - start for start, stop in found[4:]) <= 256
    (alone,) = cut_segments(tokens[100:420], [(0, 320)], NO_BREAKS, 320)
    assert segments[1].name == alone.name
    # what is not within a document is no segment
    assert cut_segments(tokens, [(0, 90)], NO_BREAKS, 256, (), fixed)[0].stop == 90
