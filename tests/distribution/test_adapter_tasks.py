"""The chats of adapter tasks: honest labels, nothing in two splits, the same for the same seed."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from benchmarks.adapters.tasks import (
    MODULES,
    NOTE_PATTERN,
    TASKS,
    Case,
    handbook_text,
    make_task,
    masked,
    note_of,
    record_of,
    stdlib_paragraphs,
    write_task,
)

SIZES = {"train": 300, "valid": 30, "test": 60}


@pytest.fixture(scope="module", params=sorted(TASKS))
def named_splits(request: pytest.FixtureRequest) -> tuple[str, dict[str, list[Case]]]:
    return request.param, make_task(request.param, 1, SIZES)


def test_splits_are_full_and_share_nothing(
    named_splits: tuple[str, dict[str, list[Case]]],
) -> None:
    """A class's methods were in train and test, and repeat each other's sentences."""
    name, splits = named_splits
    for split, size in SIZES.items():
        assert 0.5 * size <= len(splits[split]) <= size, split
    asked = {split: {case.user for case in cases} for split, cases in splits.items()}
    groups = {split: {case.group for case in cases} for split, cases in splits.items()}
    for one in splits:
        for other in splits:
            if one < other:
                assert not asked[one] & asked[other]
                # other wordings about facts that were taught are what the handbook's test asks
                is_kept_apart = name != "handbook" or "held_out" in (one, other)
                assert not (is_kept_apart and groups[one] & groups[other])
    for cases in splits.values():
        assert all(len(case.user) < 620 and len(case.answer) < 260 for case in cases)


def test_a_seed_decides_everything(named_splits: tuple[str, dict[str, list[Case]]]) -> None:
    name, splits = named_splits
    assert make_task(name, 1, SIZES) == splits
    assert make_task(name, 2, SIZES) != splits


def test_no_paragraph_names_its_module() -> None:
    paragraphs = [p for p in stdlib_paragraphs() if p.module in MODULES]
    assert {p.module for p in paragraphs} == set(MODULES)
    assert not [p for p in paragraphs if p.module in masked(p).lower()]
    labels = {case.answer for case in make_task("modules", 1, SIZES)["test"]}
    assert labels == set(MODULES)


def test_a_record_has_what_the_signature_says() -> None:
    import ast

    tree = ast.parse("def f(self, a, b=1, *, c, d=2, **rest): pass")
    node = tree.body[0]
    assert isinstance(node, ast.FunctionDef)
    assert record_of(node, "Do it.") == {
        "name": "f",
        "required": ["a", "c"],
        "optional": ["b", "d"],
        "extra": True,
        "about": "Do it",
    }


def test_a_note_has_the_form_that_the_pattern_checks() -> None:
    note = note_of("The quick 12 brown fox-hound jumps over THE lazy dog.")
    assert note == "SUBJECT: quick\nthe quick brown fox hound jumps over the\n— the clerk"
    assert re.fullmatch(NOTE_PATTERN, note)
    assert not re.fullmatch(NOTE_PATTERN, note.replace("clerk", "Clerk"))


def test_the_handbook_says_what_is_asked() -> None:
    text = handbook_text()
    assert 1000 <= len(text.split()) <= 1300  # about 1,500 tokens
    assert all(case.answer in text for case in make_task("handbook", 1, SIZES)["test"])


def test_written_files_are_chats(tmp_path: Path) -> None:
    counts = write_task("notes", tmp_path, 3, SIZES)
    told = json.loads((tmp_path / "task.json").read_text())
    assert told["sizes"] == counts
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    assert len(lines) == counts["train"]
    roles = [message["role"] for message in json.loads(lines[0])["messages"]]
    assert roles == ["user", "assistant"]
