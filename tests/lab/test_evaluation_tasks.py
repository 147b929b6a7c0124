"""The tasks for real models: their rules hold, and their answers stand only where gold says."""

from __future__ import annotations

import re
from random import Random
from typing import Any

import pytest

from gemserve.calibration.search.example import Example, ExampleDraw, with_metric
from gemserve_lab.metrics import METRICS
from gemserve_lab.tasks.code import draw_definitions
from gemserve_lab.tasks.inference import draw_chain
from gemserve_lab.tasks.registry import DEFAULT_SUBTASKS, TASKS
from gemserve_lab.tasks.words_associative import NAMES, PAIRS

NEW = [
    *(
        ("needle", name)
        for name in ("natural", "natural_several", "associative", "chain", "question_first", "code")
    ),
    *(("ruler", name) for name in ("niah_single_1", "niah_multikey_2", "niah_multikey_3")),
]
CONTRACT = (
    "niah_single",
    "niah_multikey",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
)
FUNCTION_WORDS = {
    *("a", "an", "and", "at", "be", "been", "behind", "character", "did", "for", "from"),
    *("get", "gets", "got", "had", "has", "have", "in", "is", "it", "of", "on", "s", "the", "to"),
    *("was", "what", "when", "which", "with", "can", "as"),
}


def make(tokenizer: Any, task: str, name: str, num_tokens: int = 900, index: int = 1) -> Example:
    draw = ExampleDraw(seed=3, num_tokens=num_tokens, index=index, samples=4)
    return TASKS[task][name](tokenizer, draw)


def test_the_contract_s_names_stay() -> None:
    assert set(CONTRACT) <= set(TASKS["ruler"])
    assert DEFAULT_SUBTASKS["needle"] == ("single",)


@pytest.mark.parametrize(("task", "name"), NEW)
def test_lengths_gold_and_seeds(tokenizer: Any, task: str, name: str) -> None:
    for index in range(4):
        # a UUID's line is long for a short document
        for num_tokens in (1500, 2048):
            example = make(tokenizer, task, name, num_tokens, index)
            assert example.subtask == name
            assert example.metric == "contains"
            assert 0.95 * num_tokens <= len(example.prompt.ids) <= num_tokens
        again = make(tokenizer, task, name, 2048, index)
        assert again.prompt.ids == example.prompt.ids
        gold = " ".join(tokenizer.decode(example.prompt.ids[a:b]) for a, b in example.gold)
        assert METRICS["contains"](gold, example) == 1.0


def test_the_question_first_has_nothing_after_the_document(tokenizer: Any) -> None:
    first, after = make(tokenizer, "needle", "question_first"), make(tokenizer, "needle", "natural")
    assert first.question == after.question
    text = first.prompt.text
    assert text.index(first.question) < text.index(first.answers[0])
    assert text.count(first.question) == 1
    assert first.gold[0][0] > after.gold[0][0]


def test_associations_share_no_content_word_with_their_question() -> None:
    """What shares a word with its question is found by matching words."""
    assert len(PAIRS) >= 24
    assert len({question for _, question in PAIRS}) == len(PAIRS)
    for fact, question in PAIRS:
        fact_words, words = (set(re.findall(r"[a-z]+", text.lower())) for text in (fact, question))
        assert not (fact_words & words) - FUNCTION_WORDS
    assert not {name for name in NAMES if any(name in fact for fact, _ in PAIRS)}


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("num_facts", [2, 3])
def test_chains_lead_to_one_room(seed: int, num_facts: int) -> None:
    problem, others = draw_chain(Random(seed), num_facts)
    assert len(problem.statements) == num_facts
    (answer,) = problem.answers
    assert answer.text in problem.statements[-1]
    assert not any(answer.text in text for text in (*problem.statements[:-1], *others))
    thing = problem.question.removeprefix("Where is the ").removesuffix("?")
    assert not any(thing in text for text in others)
    person = problem.statements[-1].split()[0]
    assert person in problem.statements[-2]
    assert not any(person in text for text in others)


@pytest.mark.parametrize("is_constant", [False, True])
def test_only_the_definition_asked_for_has_its_value(is_constant: bool) -> None:
    for seed in range(20):
        problem, others = draw_definitions(Random(seed), is_constant=is_constant)
        (answer,) = problem.answers
        assert answer.text in problem.statements[0]
        assert not any(answer.text in text for text in others)
        name = problem.question.split("`")[-2]
        assert name in problem.statements[0]
        assert not any(name in text for text in others)


def test_code_is_one_fenced_block(tokenizer: Any) -> None:
    for index in (0, 1):
        example = make(tokenizer, "needle", "code", 2048, index)
        prompt = example.prompt
        assert prompt.text.count("```") == 2
        ((start, stop),) = example.gold
        fences = prompt.text.index("```"), prompt.text.rindex("```")
        assert fences[0] < prompt.offsets[start][0] < prompt.offsets[stop][0] < fences[1]


@pytest.mark.parametrize("name", ["niah_multikey_2", "niah_multikey_3"])
def test_the_whole_haystack_is_facts(tokenizer: Any, name: str) -> None:
    example = make(tokenizer, "ruler", name, 2048)
    facts = re.findall(r"One of the special \w+ \w+s for (\S+) is: (\S+)\.", example.prompt.text)
    lines = [line for line in example.prompt.text.splitlines() if " is: " in line]
    assert len(lines) == len(facts) > 20
    keys, values = zip(*facts, strict=True)
    assert len(set(keys)) == len(keys)
    assert len(set(values)) == len(values)
    (key,) = (key for key, value in facts if value == example.answers[0])
    assert key in example.question
    if name == "niah_multikey_2":
        assert all(re.fullmatch(r"\d{7}", value) for value in values)


def test_a_variable_chain_is_expected_as_a_whole(tokenizer: Any) -> None:
    example = make(tokenizer, "ruler", "vt")
    assert len(example.answers) == len(example.gold) == 5


def test_another_metric_changes_nothing_else(tokenizer: Any) -> None:
    draw = ExampleDraw(seed=0, num_tokens=700, index=0, samples=1)
    maker = TASKS["needle"]["single"]
    exact, plain = with_metric(maker, "items")(tokenizer, draw), maker(tokenizer, draw)
    assert (exact.metric, plain.metric) == ("items", "contains")
    assert exact.prompt.ids == plain.prompt.ids
    said = f"It is {plain.answers[0]}."
    assert METRICS[plain.metric](said, plain) == 1.0
    assert METRICS[exact.metric](said, exact) == 0.0
