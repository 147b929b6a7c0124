"""Files of examples: what is taken from a line, and what a wrong line is told."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from gemserve.errors import ConfigError
from gemserve_lab.metrics import METRICS, check_packages
from gemserve_lab.tasks import jsonl, longbench

LINE: dict[str, Any] = {"context": "It is 5.", "question": "What is it?", "answers": ["5"]}
LONGBENCH_LINE: dict[str, Any] = {
    "input": "{context} or what?",
    "context": "Some {input} text.\n",
    "answers": ["Paragraph 3"],
    "length": 3,
    "dataset": "any",
    "language": "en",
    "all_classes": ["Paragraph 3", "other"],
    "_id": "0",
}


def write(path: Path, *lines: Any) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_lines_of_one_s_own(tmp_path: Path) -> None:
    extra = {"metric": "rouge_l", "max_tokens": 7}
    (file,) = jsonl.read_files(write(tmp_path / "mine.v2.jsonl", LINE, LINE | extra), None)
    assert file.subtask == "mine.v2"
    first, second = file.cases[1], file.cases[2]
    assert (first.document, first.task, first.answers) == ("It is 5.", "What is it?", ("5",))
    assert (first.metric, first.max_tokens) == ("f1", 128)
    assert (second.metric, second.max_tokens) == ("rouge_l", 7)
    assert list(file.first(1).cases) == [1]
    assert file.first(None) == file.first(99) == file


def test_lines_are_counted_as_an_editor_does(tmp_path: Path) -> None:
    """A text may hold other line ends raw, and a file a byte order mark, blank lines and CR LF."""
    text = json.dumps(LINE | {"context": "one\u2028two"}, ensure_ascii=False)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\xef\xbb\xbf" + f"{text}\r\n\r\n \n{text}".encode())
    (file,) = jsonl.read_files(path, ["a"])
    assert list(file.cases) == [1, 4]
    assert file.cases[4].document == "one\u2028two"


WRONG = [
    (b"[1]", "a.jsonl, line 2: [1]: must be a JSON object"),
    (b"{", "a.jsonl, line 2: not JSON in UTF-8: "),
    (b'{"context": "\xff"}', "a.jsonl, line 2: not JSON in UTF-8: "),
    (b"[" * 100_000, "a.jsonl, line 2: not JSON in UTF-8: "),
    ({"context": None}, "line 2: context=None: must be a text"),
    ({"context": "\ud800"}, "line 2: context='\\ud800': is not valid Unicode"),
    ({"question": 3}, "line 2: question=3: must be a text"),
    ({"question": " "}, "line 2: question=' ': must not be blank"),
    ({"answers": "5"}, "line 2: answers='5': must be a list of texts, at least one"),
    ({"answers": []}, "line 2: answers=[]: must be a list of texts, at least one"),
    ({"answers": ["5", 5]}, "line 2: answers=['5', 5]: must be a list of texts, at least one"),
    ({"answers": ["5", ""]}, "line 2: answers=['5', '']: must not be blank"),
    ({"metric": "exact"}, "line 2: metric='exact': must be among f1, rouge_l, items, number"),
    ({"metric": None}, "line 2: metric=None: must be a text"),
    (
        {"metric": "number", "answers": ["1", "one"]},
        "line 2: answers=['1', 'one']: must have one run of digits in each",
    ),
    # the right answer had half a point, and "1" all of it
    (
        {"metric": "number", "answers": ["1,250"]},
        "line 2: answers=['1,250']: must have one run of digits in each, such as 1250",
    ),
    (
        {"metric": "number", "answers": ["3.5"]},
        "line 2: answers=['3.5']: must have one run of digits in each",
    ),
    ({"max_tokens": 0}, "line 2: max_tokens=0: must be a whole number from 1"),
    ({"max_tokens": True}, "line 2: max_tokens=True: must be a whole number from 1"),
    ({"max_token": 9}, "line 2: max_token=9: unknown field; must be among context, question"),
]


@pytest.mark.parametrize(("wrong", "message"), WRONG)
def test_a_wrong_line_is_named(wrong: Any, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", LINE)
    line = wrong if isinstance(wrong, bytes) else json.dumps(LINE | wrong).encode()
    path.write_bytes(path.read_bytes() + line)
    with pytest.raises(ConfigError) as caught:
        jsonl.read_files(path, None)
    assert message in str(caught.value)
    assert len(str(caught.value)) < 400


def test_a_missing_field_is_named(tmp_path: Path) -> None:
    for name in LINE:
        path = write(tmp_path / "a.jsonl", {k: v for k, v in LINE.items() if k != name})
        with pytest.raises(ConfigError, match=f"a.jsonl, line 1: {name} is missing"):
            jsonl.read_files(path, None)


@pytest.mark.parametrize("name", longbench.DATASETS)
def test_every_dataset_has_its_prompt(name: str, tmp_path: Path) -> None:
    """Braces in a text are only text, and the context stands whole between both instructions."""
    path = write(tmp_path / f"{name}.jsonl", LONGBENCH_LINE)
    (file,) = longbench.read_files(path, None)
    case = file.cases[1]
    assert file.subtask == name
    assert case.document.endswith(LONGBENCH_LINE["context"])
    assert len(case.document) > len(LONGBENCH_LINE["context"])
    is_asked = name not in ("gov_report", "multi_news", "passage_count", "lcc")
    assert case.task.count(LONGBENCH_LINE["input"]) == is_asked
    assert case.question == LONGBENCH_LINE["input"]
    assert case.metric in METRICS
    assert (case.labels != ()) == (name == "trec")


def test_a_line_that_asks_nothing_is_ranked_by_its_task(tmp_path: Path) -> None:
    path = write(tmp_path / "gov_report.jsonl", LONGBENCH_LINE | {"input": ""})
    (file,) = longbench.read_files(path, None)
    assert file.cases[1].question == file.cases[1].task


def test_a_folder_gives_what_it_has(tmp_path: Path) -> None:
    for name in ("trec_e", "lcc_e"):
        write(tmp_path / f"{name}.jsonl", LONGBENCH_LINE)
    assert [f.subtask for f in longbench.read_files(tmp_path, None)] == ["trec_e", "lcc_e"]
    for name in ("qasper", "dureader", "hotpotqa"):
        write(tmp_path / f"{name}.jsonl", LONGBENCH_LINE)
    assert [f.subtask for f in longbench.read_files(tmp_path, None)] == ["qasper", "hotpotqa"]
    chosen = longbench.read_files(tmp_path, ["hotpotqa", "trec_e"])
    assert [f.subtask for f in chosen] == ["hotpotqa", "trec_e"]


@pytest.mark.parametrize(
    ("subtasks", "message"),
    [
        (None, "has no file named after a dataset, such as hotpotqa.jsonl"),
        (["dureader"], "subtasks=dureader: Chinese datasets are not scored"),
        (["nq"], "subtasks=nq: no dataset of LongBench; must be among narrativeqa, qasper"),
        (["qasper"], "qasper.jsonl: No such file or directory"),
    ],
)
def test_a_folder_without_what_is_asked(
    subtasks: list[str] | None, message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        longbench.read_files(tmp_path, subtasks)
    assert message in str(caught.value)


def test_a_file_has_one_subtask(tmp_path: Path) -> None:
    path = write(tmp_path / "trec.jsonl", LONGBENCH_LINE)
    with pytest.raises(ConfigError, match="subtasks=lcc: must be trec, the name of the file"):
        longbench.read_files(path, ["trec", "lcc"])
    with pytest.raises(ConfigError, match="subtasks=lcc: must be trec, the name of the file"):
        jsonl.read_files(path, ["lcc"])


def test_files_without_examples(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n \n")
    with pytest.raises(ConfigError, match=r"data=.*a\.jsonl: holds no examples"):
        jsonl.read_files(path, None)
    with pytest.raises(ConfigError, match=r"data=.*: Is a directory"):
        jsonl.read_files(tmp_path, None)


@pytest.mark.parametrize(
    ("metric", "package"), [("rouge_l", "rouge"), ("code_similarity", "rapidfuzz")]
)
def test_a_metric_whose_library_is_missing(
    metric: str, package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = jsonl.read_files(write(tmp_path / "a.jsonl", LINE | {"metric": metric}), None)
    check_packages(files)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        check_packages(files)
    expected = f"metric={metric}: needs {package}, as in pip install 'gemserve[eval]'"
    assert str(caught.value) == expected
    check_packages(jsonl.read_files(write(tmp_path / "b.jsonl", LINE), None))
