"""Where a file's answers stand: what `gold` takes, what it refuses, and who needs it."""

from __future__ import annotations

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from gemserve.calibration.search.example import Example, ExampleDraw
from gemserve.cli.main import main
from gemserve.errors import ConfigError
from gemserve_lab.tasks import jsonl
from gemserve_lab.tasks.example_file import check_gold

FILLER = "The river runs past the houses, they say; nobody counts them. " * 12
FACT = "The code for the lantern is 48213."
OTHER = "The code for the anchor is 77."
LINE: dict[str, Any] = {
    "context": f"{FILLER}{FACT} {FILLER}{OTHER} {FILLER}",
    "question": "What is the code for the lantern?",
    "answers": ["48213"],
    "max_tokens": 8,
}


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def make(path: Path, tokenizer: Any, line: dict[str, Any]) -> Example:
    (file,) = jsonl.read_files(write(path / "a.jsonl", line), None)
    return file.make(tokenizer, ExampleDraw(seed=0, num_tokens=1, index=1, samples=1))


def spelled(example: Example) -> list[str]:
    """The text that each range of gold tokens covers."""
    offsets, text = example.prompt.offsets, example.prompt.text
    return [text[offsets[start][0] : offsets[stop - 1][1]] for start, stop in example.gold]


@pytest.mark.parametrize(
    ("gold", "expected"),
    [
        (FACT, [FACT]),
        (f"\n {FACT}  ", [FACT]),
        ([OTHER, FACT], [FACT, OTHER]),  # in whatever order they are given
        (["is 48213.", "The code for the lantern"], ["The code for the lantern", "is 48213."]),
    ],
)
def test_passages_are_found_in_the_prompt(
    gold: str | list[str], expected: Sequence[str], tokenizer: Any, tmp_path: Path
) -> None:
    """Tokens carry the blank before a word along, and nothing else besides the passage."""
    example = make(tmp_path, tokenizer, LINE | {"gold": gold})
    assert [text.strip() for text in spelled(example)] == list(expected)


def test_a_line_without_gold_has_none(tokenizer: Any, tmp_path: Path) -> None:
    assert make(tmp_path, tokenizer, LINE).gold == ()


def test_the_template_s_own_words_are_no_gold(tokenizer: Any, tmp_path: Path) -> None:
    """Else recall would be counted on the system message, which every method keeps."""
    chatty = copy.deepcopy(tokenizer)
    said = "{% for m in messages %}{{ m.content | trim }}{% endfor %}"
    chatty.chat_template = f"You help. {FACT}\n{said}\nAnswer:"
    example = make(tmp_path, chatty, LINE | {"context": f"  {LINE['context']}", "gold": FACT})
    (span,) = example.gold
    assert example.prompt.text.count(FACT) == 2
    assert example.prompt.offsets[span[0]][0] > len("You help. " + FACT)


def test_a_template_that_rewrites_the_context_is_named(tokenizer: Any, tmp_path: Path) -> None:
    loud = copy.deepcopy(tokenizer)
    loud.chat_template = "{% for m in messages %}{{ m.content | upper }}{% endfor %}"
    with pytest.raises(ConfigError, match=r"a\.jsonl, line 1: gold: the model's chat template"):
        make(tmp_path, loud, LINE | {"gold": FACT})


@pytest.mark.parametrize(
    ("gold", "message"),
    [
        ("The code is lost.", "'The code is lost.' does not occur in the context"),
        ([FACT, "lost"], "'lost' does not occur in the context"),
        ([FACT, "the lantern is"], "'the lantern is' overlaps with another passage"),
        ([FACT, FACT], "overlaps with another passage"),
        (" ", "gold=' ': must not be blank"),
        ([], "gold=[]: must be a list of texts, at least one"),
        (3, "gold=3: must be a text"),
        (None, "gold=None: must be a text"),
    ],
)
def test_a_wrong_gold_is_named(gold: object, message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", LINE, LINE | {"gold": gold})
    with pytest.raises(ConfigError) as caught:
        jsonl.read_files(path, None)
    assert "a.jsonl, line 2: gold=" in str(caught.value)
    assert message in str(caught.value)


def test_oracle_needs_gold_in_every_line_that_is_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Where gold is missing, oracle keeps everything, and its score would be that of none."""
    data = write(tmp_path / "mine.jsonl", LINE | {"gold": FACT}, LINE)
    arguments = ["eval", "jsonl", "--data", str(data), "--methods", "oracle,position"]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert "methods=oracle: " in error
    assert "mine.jsonl, line 2 does not say where in its context the answer is" in error
    assert main([*arguments, "--samples", "1", "--keep", "64", "--json"]) == 0
    oracle, position = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert (oracle["method"], oracle["recall"]) == ("oracle", 1.0)
    assert position["recall"] == 0.0  # the ends of a text do not hold its middle


def test_gold_is_checked_by_line(tmp_path: Path) -> None:
    lines = [LINE | {"gold": FACT}] * 2
    (file,) = jsonl.read_files(write(tmp_path / "a.jsonl", *lines), None)
    check_gold([file])
    (file,) = jsonl.read_files(write(tmp_path / "a.jsonl", *lines, LINE), None)
    check_gold([file.first(2)])
    with pytest.raises(ConfigError, match=r"methods=oracle: .*a\.jsonl, line 3 does not say"):
        check_gold([file])
