"""The questions about real documents: what is written is right, and what is missing is told."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.quality import real_documents as real
from gemserve_lab.tasks import jsonl

both = pytest.mark.parametrize("questions", [real.QUESTIONS, real.HELD_OUT], ids=lambda p: p.stem)
TEXT = "\n\n".join(f"Paragraph {i} says\nthat its number is {i}." for i in range(1000))


@both
def test_this_machine_s_documents_make_valid_questions(
    questions: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At least the manual, the source files and a README are wherever the tests run."""
    path = tmp_path / "real.jsonl"
    options = [] if questions == real.QUESTIONS else ["--questions", str(questions)]
    monkeypatch.setattr("sys.argv", ["real_documents.py", "--out", str(path), *options])
    real.main()
    (file,) = jsonl.read_files(path, None)
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    asked = real.read_questions(questions)
    _, left_out = real.make_lines(asked)
    is_any_missing = any("is not on this machine" in message for message in left_out)
    assert len(lines) >= (15 if is_any_missing else 40)
    assert len(lines) + len(left_out) == len(asked)
    for line, case in zip(lines, file.cases.values(), strict=True):
        assert case.gold == (line["gold"],)
        assert line["context"].count(line["gold"]) == 1
        folded = " ".join(line["gold"].lower().split())
        assert all(answer.lower() in folded for answer in case.answers)
        assert 3000 <= real.count_tokens(line["context"]) <= 6500
        assert (case.metric, case.max_tokens) == ("contains", 32)


@both
def test_no_question_is_asked_twice(questions: Path) -> None:
    asked = [question.question for question in real.read_questions(questions)]
    assert len(set(asked)) == len(asked) >= 50
    assert len({question.source for question in real.read_questions(questions)}) >= 12


def test_the_held_out_questions_are_about_other_documents() -> None:
    first, held_out = map(real.read_questions, (real.QUESTIONS, real.HELD_OUT))
    assert {q.source for q in first}.isdisjoint(q.source for q in held_out)
    assert {q.question for q in first}.isdisjoint(q.question for q in held_out)


@pytest.mark.parametrize("place", [0.05, 0.5, 0.95])
@pytest.mark.parametrize("number", [0, 20, 500, 999])
def test_a_context_is_cut_around_its_paragraph(number: int, place: float) -> None:
    """Near an end of the document the other side makes up for what is missing there."""
    question = real.Question(
        source="any",
        gold=(f"Paragraph {number} says that",),
        question="Which number?",
        answers=(str(number),),
    )
    line = real.make_line(question, TEXT, 4000, place)
    assert line["gold"] == f"Paragraph {number} says\nthat its number is {number}."
    assert line["context"] in TEXT
    assert line["context"].startswith("Paragraph ")
    assert line["context"].endswith(".")
    num_tokens = real.count_tokens(line["context"])
    assert 3960 <= num_tokens <= 4000 + num_tokens / 10  # blank lines between are not counted
    if number == 500:
        before = line["context"].index(line["gold"]) / len(line["context"])
        assert before == pytest.approx(place, abs=0.05)


def test_paragraphs_end_at_blank_lines() -> None:
    text = "\n\na\n  b\n\n\n    c\n \n\td\n"
    found = [text[p.start : p.stop] for p in real.split_paragraphs(text)]
    assert [part.strip() for part in found] == ["a\n  b", "c", "d"]


@pytest.mark.parametrize(
    ("source", "gold", "answer", "message"),
    [
        ("licence/none", ("x",), "x", "licence/none is not on this machine"),
        ("manual/none", ("x",), "x", "manual/none is not on this machine"),
        ("source/no_such_module", ("x",), "x", "source/no_such_module is not on this machine"),
        ("source/no.such.module", ("x",), "x", "source/no.such.module is not on this machine"),
        ("changelog/none", ("x",), "x", "changelog/none is not on this machine"),
        ("readme/no-such-package", ("x",), "x", "readme/no-such-package is not on this"),
        ("manual/debugger", ("It was said",), "x", "its text stands there 0 times: 'It was said'"),
        ("manual/debugger", ("breakpoint",), "x", "its text stands there "),
        ("manual/debugger", ("tbreak [(", "It was"), "x", "does not stand there: 'It was'"),
        ("manual/debugger", ("tbreak [(",), "zebra", "the answer does not stand there: 'zebra'"),
        ("manual/in", ("If the expression",), "x", "its text stands there"),
    ],
)
def test_what_cannot_be_asked_is_left_out_by_name(
    source: str, gold: tuple[str, ...], answer: str, message: str
) -> None:
    question = real.Question(source=source, gold=gold, question="Why?", answers=(answer,))
    lines, left_out = real.make_lines([question])
    assert lines == []
    (told,) = left_out
    assert told.startswith(f"{source}: 'Why?' is left out: ")
    assert message in told
    (row,) = real.summarize(lines, [source])
    assert (row["questions"], row["left_out"], row["shortest"]) == (0, 1, None)
