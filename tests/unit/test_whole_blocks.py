"""The block of code that a passage is in: a function with its comment, an entry of a list."""

from __future__ import annotations

import numpy as np
import pytest

from gemserve.filtering.kept_ranges import KeptRanges
from gemserve.filtering.whole_blocks import block_around
from gemserve.filtering.word_ranks import RankedPassages
from gemserve.prompting.text_breaks import find_breaks

FIRST = "# How often is asked.\n# " + "Why. " * 12 + "\n@cached\ndef first(count):\n    x = 1\n\n"
FIRST += "    return x + count\n"
METHOD = (
    "    # The other one.\n    def second(self):\n        for each in self:\n            work()\n"
)
CLASS = 'class Things:\n    """Many of them."""\n\n' + METHOD + "\n    def third(self): ...\n"
PROSE = "# A heading\n\nOne paragraph.\n\nAnother one, which is indented nowhere.\n\n"
YAML = "jobs:\n  build:\n    steps:\n      - one\n      - two\n  test:\n    steps: []\nlast: 1\n"
TEXT = FIRST + "\n" + CLASS + "\n" + PROSE + YAML + "The end.\n"
BREAKS = find_breaks([(0, TEXT)], range(len(TEXT)))  # one token a character


def block(within: str, most: int) -> str | None:
    found = block_around(TEXT.index(within), BREAKS, most)
    return None if found is None else TEXT[slice(*found)]  # without blank lines behind it


@pytest.mark.parametrize(
    ("within", "most", "whole"),
    [
        ("return x", 500, FIRST),
        ("How often", 500, FIRST),
        ("@cached", 500, FIRST),
        ("return x", len(FIRST), FIRST),
        ("return x", len(FIRST) - 1, None),
        ("work()", 500, CLASS),
        ("work()", len(CLASS) - 1, METHOD),
        ("The other one", len(METHOD), METHOD),
        ("work()", 40, None),
        ("One paragraph", 500, None),
        ("Another one", 500, None),
        ("two", 500, YAML[: YAML.index("last")]),
        ("The end", 500, None),
    ],
)
def test_the_largest_block_that_fits(within: str, most: int, whole: str | None) -> None:
    assert block(within, most) == whole


def test_lines_of_any_depth_and_texts_without_breaks() -> None:
    deep = "".join(f"{' ' * depth}x{depth}:\n" for depth in range(3000)) + "end\n"
    breaks = find_breaks([(0, deep)], range(len(deep)))
    assert block_around(len(deep) // 2, breaks, 100_000) is None
    assert block_around(0, find_breaks([(0, "")], ()), 10) is None
    assert block_around(3, find_breaks([(0, "one line")], range(8)), 10) is None


@pytest.mark.parametrize(
    ("most", "kept"),
    [(2 * len(FIRST), [FIRST]), (100, ["def first(count):\n", "    return x + count\n"])],
)
def test_the_best_passage_comes_with_its_block_if_that_takes_half_of_the_room(
    most: int, kept: list[str]
) -> None:
    """The comment in front of a function, or the beginning of it, was left out."""
    starts = np.array(BREAKS.paragraphs)
    scores = np.zeros(len(starts))
    scores[starts.tolist().index(TEXT.index("    return x"))] = 1
    is_free = np.ones(len(TEXT), dtype=np.bool_)
    ranges = KeptRanges()
    RankedPassages.of(starts, scores, is_free, ()).fill(ranges, most, BREAKS, enough=1)
    texts = [TEXT[slice(*each)] for each in ranges.ranges]
    assert [text.rstrip() for text in texts] == [text.rstrip() for text in kept]
