"""`benchmarks/adapters/recall.py`: what the filter keeps under each type of adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.adapters import recall as script
from benchmarks.adapters.recall import find_lines, table, write_one_step_adapters
from gemserve.adapters.folder import write_folder
from gemserve.calibration.search.example import ExampleDraw
from gemserve.config import ModelConfig
from gemserve.contract.filter_options import FilterParams
from gemserve.model.base_model import base_of
from gemserve.model.loading.loader import load
from gemserve_lab.tasks.needle import SUBTASKS
from tests import adapters as random_adapters

TYPES = ("activation", "lora", "ntk", "prefix")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Adapters of one step, a strong one, and one of another model."""
    made = tmp_path_factory.mktemp("adapters")
    loaded = load(ModelConfig(device="cpu"))
    write_one_step_adapters(loaded, made)
    random_adapters.write(made / "strong", "prefix", loaded.model)
    tensors, given = random_adapters.tensors("activation", loaded.model)
    write_folder(
        made / "unfit",
        kind="activation",
        settings={**given, "layer": 99},
        tensors=tensors,
        base=base_of(loaded.model),
    )
    return made


def run(folder: Path, out: Path, capsys: Any, *options: str) -> tuple[list[dict[str, Any]], str]:
    script.main(
        [
            *("--model", "builtin", "--adapters", str(folder), "--out", str(out), "--smoke"),
            *("--subtask", "single", "--tokens", "384", "--keep", "default,0.25", *options),
        ]
    )
    printed = capsys.readouterr().out
    rows: list[dict[str, Any]] = json.loads(printed.splitlines()[-1])["rows"]
    return rows, printed


@pytest.mark.slow
def test_every_type_is_measured_and_a_finished_line_is_kept(
    folder: Path, tmp_path: Path, capsys: Any
) -> None:
    """A run that was stopped measured everything again, or lost what a cut-off line had."""
    out = tmp_path / "recall.jsonl"
    rows, printed = run(folder, out, capsys)
    assert {row["adapter"] for row in rows} == {"none", "strong", *TYPES}
    assert "left out: adapter unfit: layer=99" in printed
    by_name = {row["adapter"]: row for row in rows if row["keep"] == "0.25"}
    assert all(row["n"] == 2 and row["failed"] == 0 for row in rows)
    assert by_name["none"]["recall"] == 1.0  # the built-in model's filter is made for this
    assert {by_name[name]["kind"] for name in TYPES} == set(TYPES)
    assert by_name["lora"]["difference"] == 0.0
    # the strong one acts in the filter pass
    assert abs(by_name["strong"]["coverage"] - by_name["none"]["coverage"]) > 0.01
    # prompts of fewer tokens than the default budget are read whole
    assert all(row["recall"] == 1.0 for row in rows if row["keep"] == "default")

    lines = [line for line in out.read_text().splitlines() if line]
    assert len(lines) == 2 * 2 * 6
    out.write_text("\n".join(lines)[:-40])
    again, _ = run(folder, out, capsys)
    after = [line for line in out.read_text().splitlines() if line]
    assert after[: len(lines) - 1] == lines[:-1]
    assert len(after) == len(lines) + 1  # the one that was cut off, and its repetition
    assert again == rows


def test_answers_are_scored(folder: Path, tmp_path: Path, capsys: Any) -> None:
    """A request that wants only a selection ends without an answer."""
    rows, _ = run(folder, tmp_path / "recall.jsonl", capsys, "--answers", "--only", "lora")
    assert [(row["keep"], row["adapter"]) for row in rows] == [
        *(("default", "none"), ("default", "lora")),
        *(("0.25", "none"), ("0.25", "lora")),
    ]
    assert rows[0]["exact"] == rows[0]["contains"] == 1.0
    assert rows[1]["contains_difference"] == 0.0


def test_the_request_has_all_of_the_prompt(tokenizer: Any) -> None:
    """Without the question's words passages were ranked by attention alone, as by no server."""
    draw = ExampleDraw(seed=0, num_tokens=384, index=0, samples=1)
    example = SUBTASKS["single"](tokenizer, draw)
    case = script.Case("none", None, "default", FilterParams(method="sieve", keep=64))
    request = script._request(example, case, answers=False)
    assert request.selects_only
    assert request.words
    assert request.written is not None
    for name in ("anchor", "breaks", "messages", "protected", "question", "separators", "words"):
        assert getattr(request, name) == getattr(example.prompt, name), name


def line_of(adapter: str, index: int, recall: float | None, **changes: Any) -> dict[str, Any]:
    plain = {"subtask": "natural", "tokens": 4096, "needles": 3, "kind": adapter, "version": ""}
    figures = {"kept_tokens": 1024, "coverage": 0.5, "reason": None, "error": None}
    labels = {"adapter": adapter, "index": index, "keep": "default", "recall": recall}
    return {**plain, **figures, **labels, **changes}


def test_differences_are_of_the_same_needles(tmp_path: Path) -> None:
    """A needle that failed with an adapter must not count as a difference of the means."""
    lines = [line_of("none", index, recall) for index, recall in enumerate((0.0, 1.0, 1.0))]
    failed = {"adapter": "ntk", "index": 0, "keep": "default", "error": "overflow"}
    lines += [{**line_of("ntk", 0, None), **failed}]
    lines += [line_of("ntk", 1, 1.0), line_of("ntk", 2, 0.5, reason="widened")]
    plain, row = table(lines)
    assert plain["adapter"] == "none"
    assert plain["whole"] == pytest.approx(2 / 3, abs=1e-4)
    assert (row["n"], row["failed"], row["fallbacks"]) == (2, 1, 1)
    assert (row["recall"], row["whole"]) == (0.75, 0.5)
    assert (row["difference"], row["worse"], row["better"]) == (-0.25, 1, 0)
    assert row["low"] <= -0.25 <= row["high"]

    path = tmp_path / "lines.jsonl"
    repeated = {**lines[3], "error": None, "recall": 1.0}
    path.write_text("\n".join(map(json.dumps, [*lines, repeated])))
    found = find_lines(path, {"tokens": 4096})
    assert len(found) == len(lines)
    assert repeated in found
    assert find_lines(path, {"tokens": 2048}) == []
