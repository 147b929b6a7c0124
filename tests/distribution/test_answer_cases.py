"""The answer cases: the data files say what they promise, and the script asks it as a server."""

from __future__ import annotations

import json
import re
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from benchmarks.quality import answer_cases
from benchmarks.quality.answer_cases import KINDS, PLACES, Case, read_file, read_ways, score
from benchmarks.shared.finished_runs import find_run
from gemserve.contract.filter_options import FilterOptions
from gemserve.llm import LLM
from gemserve.synthetic.vocabulary import split

MARKS = re.compile(r"[?？؟]")
# Words without content. A question may share them with the fact that answers it.
FUNCTION_WORDS = frozenset(
    split(
        "a, an, the, of, to, in, on, at, for, by, from, with, and, or, but, after, without, only, "
        "can, was, were, is, are, be, been, has, have, had, did, do, does, not, it, its, his, her, "
        "he, she, they, that, there, this, who, what, when, where, which, why, how"
    )
)
NUMBERS = ("three", "four", "five", "six", "seven", "eight", "nine")


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("builtin")


def content_words(text: str) -> set[str]:
    return set(re.findall(r"[a-z0-9]+", text.lower())) - FUNCTION_WORDS


def are_of_one_stem(word: str, other: str) -> bool:
    """Whether two words begin alike, as "candle" and "candles" do."""
    shared = next(
        (i for i, pair in enumerate(zip(word, other, strict=False)) if pair[0] != pair[1]),
        min(len(word), len(other)),
    )
    return shared >= max(3, min(len(word), len(other)) - 2)


def folded(text: str) -> str:
    return " ".join(text.casefold().split())


def is_answered(text: str, case: Case) -> bool:
    return score(" ".join(text.split()), case.answers) == 1


def test_every_kind_has_its_cases() -> None:
    counts = {kind: len(list(make())) for kind, make in KINDS.items()}
    assert counts["other_words"] == counts["everything"] == 20
    assert counts["languages"] == 9 * 5 * len(PLACES)
    assert counts["conversations"] in range(25, 51, 5)  # a document may not be on this machine


@pytest.mark.parametrize("kind", KINDS)
def test_names_are_unique_and_gold_answers_the_question(kind: str) -> None:
    cases = list(KINDS[kind]())
    assert len({case.name for case in cases}) == len(cases)
    for case in cases:
        assert case.answers
        assert all(form for forms in case.answers for form in forms)
        assert case.max_tokens == (96 if kind in ("everything", "words", "several") else 32)
        if kind != "everything":
            # `make_line` leaves out real questions whose answer does not stand in their gold
            assert kind == "real" or is_answered("\n".join(case.gold), case), case.name
            # of a table one row is needed
            others = " ".join(f for f in case.facts if not any(g in f for g in case.gold))
            assert kind == "conversations" or score(others, case.answers) == 0, case.name


def test_other_words_share_none_with_the_fact() -> None:
    for entry in read_file("other_words"):
        for word in content_words(entry["question"]):
            alike = [w for w in content_words(entry["fact"]) if are_of_one_stem(word, w)]
            assert not alike, (entry["question"], word, alike)


def test_one_stem_is_noticed() -> None:
    """Otherwise the test above could pass because it finds no words alike."""
    assert are_of_one_stem("candle", "candles")
    assert are_of_one_stem("visit", "visited")
    assert not are_of_one_stem("buying", "burned")
    assert content_words("Where is the candle?") == {"candle"}


def test_languages_have_questions_and_orders() -> None:
    for words in read_file("languages").values():
        facts = words["facts"]
        assert len({entry["fact"] for entry in facts}) == len(facts) == 5
        for entry in facts:
            assert MARKS.search(entry["question"].strip()[-1])
            assert not MARKS.search(entry["asked_as_order"])


@pytest.mark.parametrize("language", read_file("languages"))
def test_notes_are_enough_and_answer_nothing(language: str) -> None:
    """A note that has an answer would be counted as right and as not found."""
    words = read_file("languages")[language]
    notes = list(islice(answer_cases.draw_notes(words, "test"), 200))
    assert len(set(notes)) == 200
    assert not any("{" in note or "}" in note for note in notes)
    assert notes[:5] == list(islice(answer_cases.draw_notes(words, "test"), 5))
    text = " ".join(notes)
    cases = [case for case in KINDS["languages"]() if case.labels["language"] == language]
    if language == "English":
        cases += [*KINDS["other_words"](), *KINDS["everything"]()]
        cases = [case for case in cases if case.labels.get("ask") not in ("count", "topics")]
    for case in cases:
        assert score(text, case.answers) == 0, (case.name, case.answers)


def test_conversations_go_on() -> None:
    entries = read_file("conversations")
    assert sum("source" in entry for entry in entries) == 5
    assert len(entries) == 10
    for entry in entries:
        assert 3000 <= entry["length"] <= 6000
        assert len(entry["turns"]) == 5
        for turn in entry["turns"]:
            assert any(folded(form) in folded(turn["reply"]) for form in turn["answers"])
            assert "source" in entry or set(turn["gold"]) <= set(entry["facts"])


def test_counts_are_those_of_the_facts() -> None:
    data = read_file("everything")
    for entry in data["cases"]:
        if entry["ask"] == "count":
            number = len(entry["items"])
            assert entry["answers"] == [NUMBERS[number - 3], str(number)]
        elif entry["ask"] == "list":
            assert len(set(entry["items"])) == len(entry["items"])
        else:
            for name in entry["topics"]:
                topic = data["topics"][name]
                for sentence in topic["sentences"]:
                    assert score(sentence, [topic["terms"]]) == 1, sentence


def test_the_question_stands_where_it_should(llm: LLM) -> None:
    cases = {case.name: case for case in KINDS["languages"]()}
    for place in PLACES:
        case = cases[f"German 2 {place}"]
        (message,) = case.messages(llm, 2000)
        parts = message["content"].split("\n\n")
        assert len(set(parts)) == len(parts)
        assert case.gold[0] in parts
        at = parts.index(case.question) / (len(parts) - 1)
        assert at == pytest.approx({"front": 0, "between": 0.5}.get(place, 1), abs=0.05)
        num_tokens = len(llm.prompt([message]).ids)
        assert 1600 < num_tokens <= 2000


def test_earlier_turns_have_their_answers(llm: LLM) -> None:
    case = next(c for c in KINDS["conversations"]() if c.name == "three ships, turn 3")
    messages = case.messages(llm, 0)
    assert [message["role"] for message in messages] == [*("user", "assistant") * 2, "user"]
    assert messages[0]["content"].endswith(
        "\n\nWhich ship was the first that came into the harbour?"
    )
    assert messages[1]["content"] == "The first ship was the Amaranth."
    assert messages[-1]["content"] == "What did she carry?"
    (way,) = read_ways("default")
    asked = answer_cases.ask(llm, case, 0, way)
    assert 3000 < len(asked.prompt.ids) <= 4000
    ((start, stop),) = asked.gold
    assert "copper wire" in llm.tokenizer.decode(asked.prompt.ids[start:stop])


def test_alone_is_only_what_answers(llm: LLM) -> None:
    case = next(KINDS["other_words"]())
    (message,) = case.messages(llm, 2000, is_alone=True)
    assert message["content"] == f"{case.gold[0]}\n\n{case.question}"


def test_gold_is_in_the_fact_that_is_asked_for(llm: LLM) -> None:
    """Another function ended with the same line, and was taken for the one in question."""
    asked, other = (f"def {name}():\n    return sorted(ports)" for name in ("leave", "load"))
    case = Case(
        kind="function_ends",
        name="a",
        labels={},
        question="What is the last line of the function that leaves?",
        answers=(("return sorted(ports)",),),
        facts=(asked,),
        gold=("    return sorted(ports)",),
        filler=lambda: iter([other] * 2),
    )
    found = answer_cases.ask(llm, case, 2400, read_ways("default")[0])
    text, ((first, _),) = found.prompt.text, found.gold
    assert text.index(other) < text.index(asked) <= found.prompt.offsets[first][0]
    alone = answer_cases.ask(llm, case, 2400, read_ways("alone")[0])
    assert len(alone.gold) == 1


def test_ways_are_names_with_options() -> None:
    ways = read_ways(
        'default,none,one_pass={"method":"sieve","window":"off"},bm25,b={"method":"bm25","keep":64}'
    )
    assert [way.name for way in ways] == ["default", "none", "one_pass", "bm25", "b"]
    assert ways[0].options == FilterOptions(return_selection=True)
    assert ways[1].options.method == "none"
    assert (ways[2].options.method, ways[2].options.window) == ("sieve", "off")
    assert [way.method for way in ways] == ["", "", "", "bm25", "bm25"]
    assert ways[4].options.keep == 64


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no_method", "method"),
        ("x={", "is not followed by JSON"),
        ('x={"keeps":1}', "keeps"),
        ('x={"method":"bm25","window":"off"}', "no such option"),
        ('alone={"method":"alone","keep":64}', "no such option"),
        ("=1", "must begin with a name"),
        ('x={"keep":64}y', "a comma must follow"),
    ],
)
def test_wrong_ways_are_told(text: str, message: str) -> None:
    with pytest.raises(SystemExit, match=re.escape(message)):
        read_ways(text)


def test_the_score_is_the_share_of_what_is_named() -> None:
    assert score("The first is Corstone, then FARNLOW.", [("Corstone",), ("Farnlow",), ("x",)]) == (
        pytest.approx(2 / 3)
    )
    assert score("It has 64 rooms", [("sixty-four", "64")]) == 1
    assert score("It has 640 rooms", [("sixty-four", "64")]) == 0
    assert score("屋顶漏水了。", [("漏水",)]) == 1


def test_cases_are_spread_evenly() -> None:
    cases = list(KINDS["languages"]())
    assert answer_cases.pick(cases, None) == cases
    assert {case.labels["language"] for case in answer_cases.pick(cases, 9)} == set(
        read_file("languages")
    )


def test_answers_are_written_at_once_and_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "cases.jsonl"
    ways = 'few={"keep":64},none,bm25={"method":"bm25","keep":64},oracle,alone'
    options = ["--model", "builtin", "--samples", "1", "--length", "2400", "--out", str(out)]
    options += ["--kinds", "other_words,everything", "--ways", ways, "--json"]
    monkeypatch.setattr("sys.argv", ["answer_cases.py", *options])
    answer_cases.main()
    lines: list[dict[str, Any]] = [json.loads(x) for x in out.read_text().splitlines() if x]
    assert [row["way"] for row in lines] == [*("few", "none", "bm25", "oracle", "alone")] * 2
    for row in lines[:5]:
        assert row["right"] in (0, 1)
        assert 0 <= row["recall"] <= 1
        assert row["seconds"] > 0
    by_way = {row["way"]: row for row in lines[:5]}
    assert by_way["none"]["recall"] == by_way["oracle"]["recall"] == by_way["alone"]["recall"] == 1
    assert by_way["bm25"]["kept_tokens"] < by_way["none"]["kept_tokens"]
    monkeypatch.setattr(answer_cases, "measure", lambda *_, **__: pytest.fail("measured again"))
    picture = tmp_path / "answers.png"
    monkeypatch.setattr("sys.argv", ["answer_cases.py", *options, "--picture", str(picture)])
    answer_cases.main()
    assert picture.stat().st_size > 0
    last = json.loads(capsys.readouterr().out.splitlines()[-1])
    groups = [(row["kind"], row["group"], row["way"], row["n"]) for row in last["rows"]]
    assert groups[0] == ("other_words", "all", "few", 1)
    assert ("everything", "all", "alone", 1) in groups
    assert len(groups) == 5 + 5 + 5  # `everything` is also grouped by what it asks for


@pytest.mark.parametrize(
    "options", [["--reader", "other"], ["--calibrate", "off"], ["--weights", "dense"], ["--shared"]]
)
def test_what_another_server_answered_is_no_answer(options: list[str]) -> None:
    """With a reader the answers that the file had from a run without one were shown."""
    (way,) = read_ways("default")
    plain, other = (
        answer_cases.settings_of(answer_cases._parser().parse_args(given), way)
        for given in ([], options)
    )
    assert find_run([other], plain) is None
    assert find_run([plain], other) is None
    assert find_run([{}], plain) == {}, "of a file that an earlier version wrote"


def test_what_chooses_outside_belongs_to_its_way_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(answer_cases.OUTSIDE, "draft", answer_cases.OUTSIDE["bm25"])
    given = answer_cases._parser().parse_args(["--draft", "small"])
    default, draft = (answer_cases.settings_of(given, way) for way in read_ways("default,draft"))
    assert (default["draft"], draft["draft"]) == (None, "small")
