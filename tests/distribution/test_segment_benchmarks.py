"""The benchmarks of segments: what their prompts are, what they report, and what goes on later."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from benchmarks.quality import real_padding, windows
from benchmarks.shared import long_documents, timed_answers
from benchmarks.shared.timed_answers import HAS_SEGMENTS
from benchmarks.speed import many_questions, window_lengths
from gemserve.llm import LLM


@pytest.mark.parametrize("task", windows.PROSE)
def test_questions_about_one_document(tokenizer: Any, task: str) -> None:
    """A later question about another document would find nothing in the cache."""
    count = 3
    drawn = list(long_documents.draw_examples(tokenizer, task, 3000, count, 1))
    assert len({example.document for example in drawn}) == 1
    assert len({example.question for example in drawn}) == count
    for example in drawn:
        assert example.subtask == task
        assert 2600 <= len(example.prompt.ids) <= 3000
        gold = " ".join(tokenizer.decode(example.prompt.ids[a:b]) for a, b in example.gold)
        assert example.answers[0].lower() in gold.lower()
    assert long_documents.MOST_QUESTIONS[task] >= windows.LONG_SAMPLES


def test_a_long_document_has_other_sentences_than_a_short_one() -> None:
    assert len(long_documents.prose(1000)) > 15_000


def test_real_questions_amid_other_documents(tokenizer: Any) -> None:
    for index in (0, 4, 21):
        _, line = real_padding.questions()[index]
        bare = real_padding.make_example(tokenizer, "real", index, 0)
        padded = real_padding.make_example(tokenizer, "real_padded", index, 12_000)
        # the estimate of a paragraph's tokens leaves out how it joins the next one
        assert len(bare.prompt.ids) < 11_000 < len(padded.prompt.ids) < 12_200
        assert line["context"] in padded.prompt.text
        (start, stop), (bare_start, bare_stop) = padded.gold[0], bare.gold[0]
        assert (
            padded.prompt.ids[start + 1 : stop - 1]
            == bare.prompt.ids[bare_start + 1 : bare_stop - 1]
        )
        assert padded.prompt.text.count(line["gold"]) == 1
        assert (padded.answers, padded.metric) == (bare.answers, "contains")
    firsts = [real_padding.make_example(tokenizer, "r", i, 12_000).gold[0][0] for i in (0, 4)]
    assert firsts[0] < 6000 < firsts[1]


def test_held_out_questions_are_a_task_of_their_own(tokenizer: Any) -> None:
    sources = {source for source, _ in real_padding.questions()}
    for index in (0, 21):
        source, line = real_padding.questions("held_out")[index]
        assert source not in sources
        example = real_padding.make_example(tokenizer, "held_out", index, 0)
        assert line["context"] in example.prompt.text
        assert line["question"] == example.question
    assert windows._samples(None, "held_out", 0) == len(real_padding.questions("held_out"))
    assert windows.LENGTHS["held_out"] == (0,)


def test_an_empty_cell_says_why() -> None:
    cell = windows.Cell()
    cell.refused["too long"] += 2
    assert cell.figures() == {"n": 0, "impossible": "too long", "refused": {"too long": 2}}


def test_each_segment_is_a_cell() -> None:
    found = list(windows._with_segments(["windows", "none"], "auto,2048"))
    assert found == [("windows", "auto"), ("windows", 2048), ("none", None)]


def test_cells_are_written_at_once_and_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cells.jsonl"
    options = ["--model", "builtin", "--tasks", "pairs", "--samples", "1", "--keep", "64"]
    options += ["--ways", "one pass,bm25", "--out", str(out), "--json", "--lengths"]
    monkeypatch.setattr("sys.argv", ["windows.py", *options, f"700,{windows.LONG}"])
    windows.main()
    lines = [json.loads(line) for line in out.read_text().splitlines() if line]
    assert [(r["prompt_tokens"], r["way"], r["n"]) for r in lines] == [
        *((700, "one pass", 1), (700, "bm25", 1)),
        *((windows.LONG, "one pass", 0), (windows.LONG, "bm25", 1)),
    ]
    for row in lines:
        if row["n"] == 0:
            assert "context" in row["impossible"] or "long" in row["impossible"]
        else:
            assert 0 <= row["linked_recall"] <= 1
            assert row["peak_rss_mib"] >= row["rss_before_mib"] > 0
            assert row["total_s"] > 0
    monkeypatch.setattr(windows, "_answer", lambda *_: pytest.fail("measured again"))
    monkeypatch.setattr("sys.argv", ["windows.py", *options, "700"])
    windows.main()
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [row["n"] for row in last["rows"]] == [1, 1]


@pytest.mark.parametrize("has_segments", [False, True])
def test_the_segment_is_passed_to_servers_that_have_segments(
    monkeypatch: pytest.MonkeyPatch, has_segments: bool
) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(timed_answers, "HAS_SEGMENTS", has_segments)
    monkeypatch.setattr(timed_answers, "FilterOptions", lambda **given: seen.append(given))
    timed_answers.filter_options("off", keep=64)
    timed_answers.filter_options(method="none")
    passed = {"window": "off"} if has_segments else {}
    assert seen == [
        {"keep": 64, "return_selection": True, **passed},
        {"method": "none", "return_selection": True},
    ]


@pytest.mark.skipif(HAS_SEGMENTS, reason="this server has windows")
def test_a_server_without_segments_is_told() -> None:
    assert window_lengths.measure(None, "windows", 1)["reason"].endswith("filter.window")


def test_a_line_is_told_from_a_parabola() -> None:
    straight = window_lengths.fit_line([(n, 2 + n / 500) for n in (1000, 4000, 64_000)])
    assert straight["slope_per_1k_tokens"] == pytest.approx(2)
    assert straight["constant"] == pytest.approx(2)
    assert straight["largest_deviation"] < 1e-9
    bent = window_lengths.fit_line([(n, n * n / 1e6) for n in (1000, 4000, 64_000)])
    assert bent["largest_deviation"] > 0.3
    assert bent["exponent"] == pytest.approx(2)


def test_a_picture_is_drawn_without_segments(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"way": "one pass", "real_tokens": n, "choose_s": n / 100, "ttft_s": None}
        for n in (100, 200, 400)
    ]
    rows.append({"way": "windows", "reason": "no"})
    short = {"real_tokens": 50, "choose_s": None, "ttft_s": 9.0, "filter_reason": "short_prompt"}
    rows.append({"way": "one pass", **short})
    lines = [fit for way in window_lengths.WAYS for fit in window_lengths.fits(rows, way)]
    assert [(line["way"], line["line"]) for line in lines] == [("one pass", "choose_s")]
    window_lengths.draw(rows, lines, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_ten_questions_have_their_facts_in_the_document(tokenizer: Any) -> None:
    document, questions = many_questions.draw_document(tokenizer, Random(1), 3000, 10)
    assert len(set(questions)) == 10
    num_tokens = len(tokenizer.backend_tokenizer.encode(document).ids)
    assert 2500 <= num_tokens <= 3000


def test_the_summary_of_many_questions() -> None:
    asked = [{"ttft_s": 4.0}, {"ttft_s": 1.0}, {"ttft_s": 3.0}, {"ttft_s": 1.0}]
    row = many_questions.summary("default", 6000, asked)
    assert (row["first_s"], row["later_s"], row["longest_later_s"]) == (4.0, 1.0, 3.0)
    assert row["first_to_later"] == 4.0
    refused = many_questions.summary("none", 64000, [{"reason": "status 400"}])
    assert refused["reason"] == "status 400"


def test_the_ways_of_asking() -> None:
    assert many_questions.filter_field("default") == {}
    assert many_questions.filter_field("none") == {"filter": {"method": "none"}}
    assert many_questions.filter_field("keep=512") == {"filter": {"keep": 512}}
    with pytest.raises(SystemExit, match="all"):
        many_questions.filter_field("all")


def test_segments_cost_in_proportion_to_their_number() -> None:
    """One pass costs the square of its length, so segments have to be cheaper."""
    core = LLM("builtin").core
    one, two, ten = (window_lengths.flops(core, n * 2048, 512, 2048) for n in (1, 2, 10))
    assert two - one == pytest.approx((ten - one) / 9)
    assert window_lengths.flops(core, 20_480, 512, None) > ten
