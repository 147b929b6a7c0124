"""The segments that a search finds are those that attention and words name, and no others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gemserve.contract.filter_plan import QueriesRead
from gemserve_library.keys_file import rounded_keys
from gemserve_library.scan import attention_to_segments
from gemserve_library.search import order_segments, search
from tests.library.worlds import (
    IDENTITY,
    add,
    keys_of_tokens,
    open_library,
    paragraphs,
    text_source,
)

NO_ROWS = np.zeros((2, 1), np.float32)


def drawn_queries(rng: np.random.Generator, softcap: float | None = None) -> QueriesRead:
    """Of two heads and three rows, for keys of 8 numbers."""
    return QueriesRead(
        queries=rng.normal(size=(2, 3, 8)).astype(np.float32),
        sinks=rng.normal(size=(2, 3)).astype(np.float32),
        softcaps=(softcap, softcap),
    )


@pytest.mark.parametrize("softcap", [None, 3.0])
def test_scores_are_shares_of_one_softmax(softcap: float | None) -> None:
    """Over the segments of all libraries, whatever gaps and blocks there are between them."""
    rng = np.random.default_rng(1)
    queries = drawn_queries(rng, softcap)
    parts, logits = [], []
    for sizes in ([5, 3, 9], [4]):
        keys = rng.normal(size=(2, 40, 8)).astype(np.float32)
        records = rounded_keys(keys)
        whole = records["keys"].astype(np.float32) * records["scale"].astype(np.float32)[..., None]
        starts, counts = np.array([0, 10, 20][: len(sizes)]), np.array(sizes)
        parts.append((records, starts, counts))
        for start, count in zip(starts, counts, strict=True):
            part = whole[start : start + count]  # [tokens, key heads, head_dim]
            found = np.stack([queries.queries[h] @ part[:, (1, 0)[h]].T for h in (0, 1)])
            logits.append(found if softcap is None else softcap * np.tanh(found / softcap))
    total = np.exp(queries.sinks) + sum(np.exp(each).sum(-1) for each in logits)
    expected = [float((np.exp(each).max(-1) / total).max()) for each in logits]
    scores = np.concatenate(attention_to_segments(queries, (1, 0), parts))
    np.testing.assert_allclose(scores, expected, rtol=1e-4)


def test_blocks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(2)
    queries = drawn_queries(rng)
    records = rounded_keys(rng.normal(size=(2, 90, 8)).astype(np.float32))
    counts = rng.integers(1, 6, 15)
    starts = np.arange(15) * 6
    part = [(records, starts, counts)]
    (whole,) = attention_to_segments(queries, (0, 1), part)
    monkeypatch.setattr("gemserve_library.scan._AT_ONCE", 13)
    (blocks,) = attention_to_segments(queries, (0, 1), part)
    np.testing.assert_allclose(blocks, whole, rtol=1e-5)


def test_a_segment_of_two_files_counts_once() -> None:
    """Its records are there once, and twice in the list of segments."""
    rng = np.random.default_rng(5)
    queries = drawn_queries(rng)
    records = rounded_keys(rng.normal(size=(2, 9, 8)).astype(np.float32))
    once = [(records, np.array([0, 4]), np.array([4, 5]))]
    twice = [(records, np.array([0, 0, 4, 4]), np.array([4, 4, 5, 5]))]
    (single,) = attention_to_segments(queries, (0, 1), once)
    (double,) = attention_to_segments(queries, (0, 1), twice)
    np.testing.assert_array_equal(double, single[[0, 0, 1, 1]])


def test_damaged_segments_score_nothing() -> None:
    records = rounded_keys(np.ones((2, 4, 8), np.float32))
    counts = np.array([0, 2])
    (scores,) = attention_to_segments(
        drawn_queries(np.random.default_rng(3)), (0, 1), [(records, np.array([0, 2]), counts)]
    )
    assert scores[0] == 0 < scores[1]


def test_a_rare_word_finds_its_segment(tmp_path: Path, tokenizer: Any) -> None:
    library = open_library(tmp_path / "a")
    texts = {"x": paragraphs(200), "y": paragraphs(100, "lake") + "\n\nThe heron eats eels."}
    add(library, tokenizer, [text_source(path, text) for path, text in texts.items()])
    found = search([library], None, (0, 1), "What does the HERON eat?", 1)
    (candidate,) = found.candidates
    assert candidate.file.path == "y"
    assert "heron" in candidate.segment.text
    assert found.num_segments == len(library.index().ids)
    assert search([library], None, (0, 1), "Qwertz?", 4).candidates == ()


def test_words_without_spaces_are_found_by_pairs(tmp_path: Path, tokenizer: Any) -> None:
    library = open_library(tmp_path / "a")
    add(
        library,
        tokenizer,
        [text_source("x", "灯台の鍵は青い箱にある。"), text_source("y", "川は流れる。")],
    )
    (candidate,) = search([library], None, (0, 1), "鍵はどこ", 1).candidates
    assert candidate.file.path == "x"


@pytest.mark.parametrize(
    ("text", "asked"),
    [
        ("Hauptstraße", "HAUPTSTRAẞE"),
        ("İstanbul", "İSTANBUL"),
        ("cafe\u0301", "Cafe\u0301"),
        ("λόγος", "ΛΌΓΟΣ"),
        ("և", "և"),
    ],
)
def test_words_that_grow_in_another_case_and_accents_of_their_own_are_found(
    tmp_path: Path, tokenizer: Any, text: str, asked: str
) -> None:
    """Their upper or lower case has more characters, which the index does not have."""
    library = open_library(tmp_path / "a")
    add(library, tokenizer, [text_source("x", f"The {text} is old."), text_source("y", "Caf.")])
    for question in (text, asked):
        assert len(library.by_words(question, library.index().num_passages)) == 1


def test_attention_finds_what_no_word_names(tmp_path: Path, tokenizer: Any) -> None:
    """The token that the question looks for has the largest key in the direction of its query."""
    library = open_library(tmp_path / "a")
    add(library, tokenizer, [text_source("x", paragraphs(100)), text_source("y", "The heron.")])
    others = set(tokenizer(paragraphs(100))["input_ids"])
    only = next(i for i in tokenizer("The heron.")["input_ids"] if i not in others)
    key = keys_of_tokens(np.array([only]))[:, 0]  # [2, 4]
    queries = QueriesRead(queries=20 * key[:, None], sinks=NO_ROWS, softcaps=(None, None))
    found = search([library], queries, (0, 1), "", 1).candidates
    assert "y" in [candidate.file.path for candidate in found]
    assert len(found) < 4


def test_attention_decides_if_hardly_any_word_of_the_question_is_there() -> None:
    attention, words = np.array([0.1, 0.9, 0.2]), np.array([2.0, 0.0, 1.0])
    in_their_words, in_others = 4.0, 40.0  # what a segment with all words would score
    assert order_segments(attention, words, in_their_words).tolist() == [0, 2, 1]
    assert order_segments(attention, words, in_others).tolist() == [1, 2, 0]
    assert order_segments(attention, np.zeros(3), 0.0)[0] == 1


def test_no_segment_scores_more_than_one_with_all_words(tmp_path: Path, tokenizer: Any) -> None:
    library = open_library(tmp_path / "a")
    texts = [paragraphs(200), paragraphs(100, "lake"), "heron eats eels", "Herons fly south."]
    add(library, tokenizer, [text_source(str(i), text) for i, text in enumerate(texts)])
    num_passages = library.index().num_passages
    most = library.most_by_words("heron eats eels", num_passages)
    found = library.by_words("heron eats eels", num_passages)
    assert 0.5 * most < max(found.values()) <= most
    assert library.most_by_words("heron eats eels whales", num_passages) > most


def test_short_segments_count_for_a_part(tmp_path: Path, tokenizer: Any) -> None:
    library = open_library(tmp_path / "a")
    sources = [text_source(str(i), f"The heron eats {i} eels.") for i in range(40)]
    add(library, tokenizer, [*sources, text_source("x", paragraphs(400))])
    queries = drawn_queries(np.random.default_rng(4))
    queries = QueriesRead(
        queries=queries.queries[..., :4], sinks=queries.sinks, softcaps=queries.softcaps
    )
    found = search([library], queries, (0, 1), "heron", 2).candidates
    assert 2 < len(found) <= 16
    paths = [(each.file.path, each.segment.start) for each in found]
    assert paths == sorted(paths)
    assert sum(each.segment.num_tokens for each in found) <= 2 * IDENTITY.window


def test_segments_with_damaged_keys_count_as_large_as_they_are(
    tmp_path: Path, tokenizer: Any
) -> None:
    """They counted as an eighth: eight times as many were read as were asked for."""
    library = open_library(tmp_path / "a")
    texts = {"x": paragraphs(60, "lake"), "y": paragraphs(600)}
    add(library, tokenizer, [text_source(path, text) for path, text in texts.items()])
    os.truncate(library.folder / "keys.0", 0)
    library = open_library(tmp_path / "a")
    found = search([library], None, (0, 1), "lake", 2)
    assert library.damaged == ("x", "y")
    assert 0 < sum(each.segment.num_tokens for each in found.candidates) <= 2 * IDENTITY.window
    assert found.num_tokens == library.totals()[2]


def test_what_is_added_after_the_index_was_read_is_no_error(
    tmp_path: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first file of a library, added during a search, ended it with an internal error."""
    library = open_library(tmp_path / "a")
    empty = library.index()
    add(library, tokenizer, [text_source("x", "The heron.")])
    assert library.by_words("heron", 1)
    monkeypatch.setattr(library, "index", lambda: empty)
    assert search([library], None, (0, 1), "heron").candidates == ()
