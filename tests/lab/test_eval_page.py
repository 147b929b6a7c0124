"""The page that `gemserve eval --out` writes says what the figures mean, and only what is clear."""

from __future__ import annotations

from typing import Any

import pytest

from gemserve_lab.report import page, what_follows


def difference(method: str, other: str, low: float, high: float) -> dict[str, Any]:
    middle = (low + high) / 2
    return {
        "method": method,
        "other": other,
        "difference": middle,
        "low": low,
        "high": high,
        "n": 40,
    }


@pytest.mark.parametrize(
    ("method", "other", "low", "high", "expected"),
    [
        ("sieve", "none", 0.1, 0.3, "filter these questions"),
        ("sieve", "none", -0.3, -0.1, "read these prompts whole"),
        ("sieve", "sieve:auto", 0.1, 0.3, "`--filter-keep` with that number"),
        ("sieve", "sieve:auto", -0.3, -0.1, "`--filter-keep auto`"),
        ("sieve", "bm25", -0.3, -0.1, "`gemserve calibrate`"),
    ],
)
def test_a_clear_difference_has_a_consequence(
    method: str, other: str, low: float, high: float, expected: str
) -> None:
    (advice,) = what_follows([difference(method, other, low, high)])
    assert expected in advice


def test_what_may_be_chance_has_none() -> None:
    found = what_follows(
        [difference("sieve", "none", -0.1, 0.2), difference("snapkv", "none", 1, 2)]
    )
    assert found == ["No difference is clear of chance. Ask more questions, or other ones."]


def test_the_page_has_rows_differences_and_pictures() -> None:
    row = {
        "method": "sieve",
        "subtask": "single",
        "prompt_tokens": 4096,
        "keep": 512,
        "score": 0.75,
        "recall": None,
        "kept_tokens": 512.0,
        "n": 40,
    }
    whole = {
        "task": "needle",
        "model": "mine",
        "seed": 0,
        "rows": [row, {**row, "recall": 0.5}],
        "comparisons": [difference("sieve", "none", -0.1, 0.2)],
    }
    text = page(whole, ["needle.png"])
    assert text.startswith("# needle: mine\n")
    assert "| single | 4,096 | 40 | `sieve` | 512 | 0.75 |  |" in text
    assert "| single | 4,096 | 40 | `sieve` | 512 | 0.75 | 0.50 |" in text
    assert "| `sieve` − `none` | +0.050 | -0.100 to +0.200 | 40 | may be chance |" in text
    assert text.endswith("![needle.png](needle.png)\n")
