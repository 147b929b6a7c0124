"""`gemserve adapter eval`: rules, examples before a question, and the command end to end."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gemserve.cli.main import main
from gemserve.config import EngineConfig, ModelConfig
from gemserve.engine.build import assemble
from gemserve.engine.core import Core
from gemserve.errors import AdapterError
from gemserve.model.adapter import NO_ADAPTER
from gemserve.model.base_model import base_of
from gemserve.model.loading.loader import load
from gemserve_train.evaluation.answer_rules import RULES, interval, matching, paired
from gemserve_train.evaluation.chats import behind_prefix, draw_shots, read_questions
from gemserve_train.evaluation.evaluate import answer_all, answer_loss, evaluate
from gemserve_train.examples import end_token
from gemserve_train.parameters import PrefixParameters


@pytest.mark.parametrize(
    ("rule", "answer", "expected", "score"),
    [
        ("exact", " a b\n", "a b", 1.0),
        ("exact", "a b.", "a b", 0.0),
        ("contains", "It is  Monday.", "monday", 1.0),
        ("contains", "It is 482.", "48", 0.0),
        ("json", '{"b": 1, "a": [2]}', '{"a": [2], "b": 1}', 1.0),
        ("json", '{"a": 1', '{"a": 1}', 0.0),
        ("fields", '{"a": 1, "b": 3}', '{"a": 1, "b": 2}', 0.5),
        ("fields", "[1]", '{"a": 1}', 0.0),
        ("fields", "[" * 100_000, '{"a": 1}', 0.0),
    ],
)
def test_rules(rule: str, answer: str, expected: str, score: float) -> None:
    assert RULES[rule](answer, expected) == score


def test_a_pattern_is_about_the_whole_answer() -> None:
    rule = matching(r"[a-z]+\n— the clerk")
    assert rule(" note\n— the clerk ", "") == 1.0
    assert rule("A note\n— the clerk", "") == 0.0


def test_intervals() -> None:
    """Of 0 of 20 right, the normal approximation says that no answer can ever be right."""
    low, high = interval([0.0] * 20)
    assert low == 0.0
    assert 0.1 < high < 0.2
    mean, below, above = paired([1.0, 1.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0])
    assert mean == 0.5
    assert below < 0.5 < above


@pytest.fixture(scope="module")
def core() -> Core:
    return assemble(load(ModelConfig()), EngineConfig(calibrate="off", cache_memory=0.0))


def chats(path: Path, values: range, system: str | None = None) -> Path:
    lines = []
    for i in values:
        lead = [] if system is None else [{"role": "system", "content": system}]
        asked = f"The code for the lantern is {i}.\n\nWhat is the code for the lantern?"
        turns = [{"role": "user", "content": asked}, {"role": "assistant", "content": str(i)}]
        lines.append({"messages": [*lead, *turns]})
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def questions_of(core: Core, path: Path, **options: Any) -> Any:
    settings = {"max_tokens": 500, **options}
    return read_questions(path, core.tokenizer, end_token(core.tokenizer, core.eos_ids), **settings)


def test_what_prompts_share_is_read_once_and_changes_nothing(core: Core, tmp_path: Path) -> None:
    """With a prefix in place of the examples, answers and losses are those of the whole prompts."""
    shots = draw_shots(chats(tmp_path / "shots.jsonl", range(500, 520)), 2, seed=1)
    path = chats(tmp_path / "test.jsonl", range(100, 106), system="Answer briefly.")
    questions = questions_of(core, path, shots=shots)
    prefix, rest = behind_prefix(core.model, questions)
    assert prefix is not None
    assert prefix.num_positions > 20
    whole, split = (
        answer_all(core, [q.example.ids[: q.example.num_prompt] for q in asked], 8, adapter=used)
        for asked, used in ((questions, None), (rest, prefix))
    )
    assert whole == split
    assert answer_loss(core.model, prefix, rest) == pytest.approx(
        answer_loss(core.model, NO_ADAPTER, questions), rel=1e-4
    )


def test_shots_come_between_system_message_and_question(core: Core, tmp_path: Path) -> None:
    path = chats(tmp_path / "test.jsonl", range(100, 101), system="Answer briefly.")
    shots = draw_shots(chats(tmp_path / "s.jsonl", range(500, 503), system="Other."), 3, seed=0)
    (question,) = questions_of(core, path, shots=shots)
    text = core.tokenizer.decode(question.example.ids)
    assert "Other" not in text
    assert text.index("briefly") < text.index("lantern is 50") < text.index("lantern is 100")
    assert question.expected == "100"


def test_faults_are_named(core: Core, tmp_path: Path) -> None:
    plain = tmp_path / "plain.jsonl"
    plain.write_text('{"prompt": "a", "completion": "b"}\n')
    shots = draw_shots(chats(tmp_path / "s.jsonl", range(3)), 1, seed=0)
    with pytest.raises(AdapterError, match=r"plain\.jsonl: line 1: only chats"):
        questions_of(core, plain, shots=shots)
    with pytest.raises(AdapterError, match="has 3 chats, 4 are asked for"):
        draw_shots(tmp_path / "s.jsonl", 4, seed=0)
    with pytest.raises(AdapterError, match=r"plain\.jsonl: line 1: .*limit is 1"):
        questions_of(core, plain, max_tokens=1)


def test_an_adapter_acts_on_answers_and_loss(core: Core, tmp_path: Path) -> None:
    from gemserve.adapters.kinds import load_adapter

    questions = questions_of(core, chats(tmp_path / "t.jsonl", range(100, 104)))
    made = PrefixParameters(core.model, list(questions[0].example.ids[:6]))
    base = base_of(core.model)
    made.write(tmp_path / "p", base)
    adapter = load_adapter("p", tmp_path / "p", core.model, base, 1 << 30)
    rules = {"exact": RULES["exact"]}
    plain = evaluate(core, "without", None, questions, rules, 8)
    adapted = evaluate(core, "p", adapter, questions, rules, 8)
    assert plain.loss != adapted.loss
    assert len(adapted.scores["exact"]) == 4


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(chats(tmp_path / "test.jsonl", range(100, 106)))
    shots = str(chats(tmp_path / "shots.jsonl", range(500, 520)))
    options = ["--few-shot", "2", "--shots", shots, "--rule", "contains", "--limit", "4"]
    kept = tmp_path / "answers.json"
    command = ["adapter", "eval", "--data", data, "--max-tokens", "8", "--json"]
    assert main([*command, *options, "--answers", str(kept)]) == 0
    out = capsys.readouterr().out
    result = json.loads(out.splitlines()[-1])
    assert [row["name"] for row in result["results"]] == ["without", "few-shot 2"]
    assert result["results"][0]["n"] == 4
    assert result["paired"][0]["to"] == "without"
    assert "few-shot 2 − without, contains" in out
    assert [len(given) for given in json.loads(kept.read_text()).values()] == [4, 4]


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--few-shot", "2"], "--few-shot and --shots: must be given together"),
        (["--rule", "pattern"], "--rule pattern and --pattern: must be given together"),
        (["--rule", "pattern", "--pattern", "("], "--pattern: is no regular expression"),
        (["--adapter", "/nowhere"], "/nowhere: no such folder"),
    ],
)
def test_bad_options(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str], fault: str
) -> None:
    data = str(chats(tmp_path / "t.jsonl", range(100, 102)))
    assert main(["adapter", "eval", "--data", data, *options]) == 2
    assert fault in capsys.readouterr().err
