"""Prompts that are converted into adapters: what is learnt from and tested, and one whole run."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks.adapters import conversion as script
from benchmarks.adapters.conversion_tasks import CONVERSIONS
from benchmarks.adapters.tasks import handbook_text


@pytest.mark.parametrize("name", sorted(CONVERSIONS))
@pytest.mark.slow
def test_no_test_is_learnt_from(name: str) -> None:
    conversion = CONVERSIONS[name](1, 60, 20)
    learnt = set(conversion.learnt_from)
    assert 40 <= len(conversion.learnt_from) <= 60
    told = {message["content"] for message in conversion.before}
    for kind, cases in conversion.tests.items():
        assert cases, kind
        assert not {case.user for case in cases} & (learnt | told)


def test_facts_never_asked_are_in_the_prompt_alone() -> None:
    guide = CONVERSIONS["guide"](1, 60, 20)
    for case in guide.tests["facts never asked"]:
        assert case.answer in guide.before[0]["content"]
        facts = [asked for asked in guide.learnt_from if "\n\n" not in asked]
        assert len(facts) == 30
        assert not any(re.search(rf"\b{case.group}\b", asked) for asked in facts)
    handbook = CONVERSIONS["handbook"](1, 200, 20)
    assert handbook.before[0]["content"] == handbook_text()
    never = {case.group for case in handbook.tests["facts never asked"]}
    assert not never & {case.group for case in handbook.tests["facts asked before"]}


def test_a_run_is_finished_line_by_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With the built-in model, which has learnt none of it. A second start repeats nothing."""
    out = tmp_path / "runs.jsonl"
    given = (
        f"conversion.py --model builtin --task letters --out {out} --sizes 2 --positions 3 "
        "--tests 2 --chats 6 --distill-steps 2 --fit-steps 2 --no-timing --json"
    )
    monkeypatch.setattr(sys, "argv", given.split())
    script.main()
    runs = [json.loads(line) for line in out.read_text().split("\n") if line]
    assert [run["arm"] for run in runs] == ["the prompt", "nothing", "ntk 2", "prefix 3"]
    assert all(set(run["tests"]) == {"other things", "other questions"} for run in runs)
    prompt, nothing, ntk, prefix = runs
    assert prompt["tests"]["other things"]["same_answers"] == 1.0
    assert nothing["tests"]["other things"]["kl"] > 0
    assert (ntk["steps_made"], prefix["steps_made"]) == (2, 2)
    assert ntk["parameters"] > 0 < prefix["bytes"] < prompt["bytes"]
    before = out.read_text()
    script.main()
    assert out.read_text() == before
    rows = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert len(rows) == 8
