"""The library's benchmark: what is cut around a passage, the order of questions, what counts."""

from __future__ import annotations

from typing import Any

from benchmarks.quality.library import Asked, in_turn, near, summary

LINES = [f"line {number:02}\n" for number in range(40)]
TEXT = "".join(LINES)


def asked(kind: str, question: str) -> Asked:
    return Asked(kind, question, ("x",), "gold", "file.txt")


def test_a_document_is_cut_to_whole_lines_around_its_passages() -> None:
    cut = near(TEXT, ["line 20"], 16)
    assert cut == "".join(LINES[18:23])
    assert near(TEXT, ["line 05", "line 30"], 0).splitlines() == ["line 05", "line 30"]
    assert near(TEXT, ["line 19 line 20"], 0) == "line 19\nline 20\n"  # a passage over two lines
    assert near(TEXT, ["line 20"], 10_000) == TEXT
    assert near(TEXT, [], 16) == ""


def test_kinds_come_in_turn_and_no_question_is_lost() -> None:
    given = [asked("real", f"r{i}") for i in range(5)] + [asked("planted", f"p{i}") for i in (1, 2)]
    order = in_turn(given)
    assert [each.kind for each in order] == ["planted", "real", "planted", *["real"] * 4]
    assert sorted(each.question for each in order) == sorted(each.question for each in given)
    assert order == in_turn(given)


def line(question: str, read: str, right: bool, total_s: float = 2.0) -> dict[str, Any]:
    figures = {"right": right, "kept": 100, "gold": True, "found": True, "ttft_s": 1.0}
    return {"kind": "real", "question": question, "read": read, "total_s": total_s, **figures}


def test_only_questions_that_all_ways_answered_are_counted() -> None:
    """Else a way that was left out of the hard ones would look better."""
    lines = [line("a", "bm25", True), line("a", "library 4", False), line("b", "bm25", True)]
    rows = summary(lines)
    assert {(row["kind"], row["read"], row["n"], row["right"]) for row in rows} == {
        ("real", "bm25", 1, 1),
        ("real", "library 4", 1, 0),
        ("all", "bm25", 1, 1),
        ("all", "library 4", 1, 0),
    }
    assert all(row["questions_a_second"] == 0.5 for row in rows)
    assert summary([]) == []
