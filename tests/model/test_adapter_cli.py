"""`gemserve adapter`: the counting contract; train, convert and inspect once each, end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from gemserve.cli.main import main


def last_json(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    result: dict[str, Any] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return result


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["--type", "ntk", "--r", "128", "--s", "4"], 1_179_648),
        (["--type", "ntk", "--r", "256", "--s", "64"], 25_427_968),
        (["--type", "prefix", "--length", "10"], 2 * 32 * 8 * 10 * 128),
        (["--type", "activation"], 4096),
    ],
)
def test_dry_run_needs_only_the_config(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], expected: int
) -> None:
    LlamaConfig(
        hidden_size=4096,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        intermediate_size=14336,
    ).save_pretrained(tmp_path)
    arguments = ["adapter", "train", "--dry-run", "--json", "--model", str(tmp_path)]
    assert main([*arguments, *options]) == 0
    result = last_json(capsys)
    assert (result["type"], result["parameters"]) == (options[1], expected)


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--type", "ntk", "--r", "31", "--dry-run"], "r=31: must be the model's head_dim, 32"),
        (["--type", "ntk"], "--data: is needed"),
        (
            ["--type", "ntk", "--data", "/nowhere.jsonl", "--out", "/tmp/x"],
            "/nowhere.jsonl: cannot",
        ),
    ],
)
def test_bad_options_are_named(
    capsys: pytest.CaptureFixture[str], options: list[str], fault: str
) -> None:
    assert main(["adapter", "train", *options]) == 2
    assert fault in capsys.readouterr().err


def chats(path: Path, count: int) -> Path:
    lines = [
        {
            "messages": [
                {"role": "user", "content": f"The code for the lantern is {i}.\n\nWhat is it?"},
                {"role": "assistant", "content": str(i)},
            ]
        }
        for i in range(100, 100 + count)
    ]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_train_convert_inspect(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(chats(tmp_path / "chats.jsonl", 16))
    made = str(tmp_path / "made")
    options = ["--type", "prefix", "--length", "4", "--epochs", "1", "--evals", "1"]
    assert main(["adapter", "train", *options, "--data", data, "--out", made, "--json"]) == 0
    assert last_json(capsys)["num_parameters"] == 2 * 8 * 4 * 4 * 32
    assert main(["adapter", "inspect", made, "--json"]) == 0
    assert last_json(capsys)["type"] == "prefix"

    steps = ["--fit-steps", "20", "--distill-steps", "1", "--json"]
    term, told = str(tmp_path / "term"), str(tmp_path / "told")
    assert (
        main(["adapter", "convert", "--prefix", made, "--data", data, "--out", term, *steps]) == 0
    )
    result = last_json(capsys)
    assert result["positions"] == 4
    assert len(result["layers"]["fitted"]) == 8
    (tmp_path / "system.txt").write_text("You answer with the number alone. " * 8)
    source = ["--prompt", str(tmp_path / "system.txt")]
    assert main(["adapter", "convert", *source, "--data", data, "--out", told, *steps]) == 0
    assert last_json(capsys)["positions"] > 40
    assert main(["adapter", "inspect", told, "--json"]) == 0
    assert last_json(capsys)["settings"]["positions"] > 40


@pytest.mark.slow
def test_a_rate_that_only_harms_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The adapter of the first evaluation is kept, which does nothing; it looked like success."""
    data = str(chats(tmp_path / "chats.jsonl", 16))
    options = ["--type", "activation", "--batch-size", "4", "--epochs", "1", "--evals", "4"]
    rate = ["--learning-rate", "100", "--warmup-share", "0.25"]
    out = str(tmp_path / "hot")
    assert main(["adapter", "train", *options, *rate, "--data", data, "--out", out]) == 0
    said = capsys.readouterr().out
    assert "activation for builtin" in said
    assert "a learning rate below 100 may help" in said
