"""A reader whose tokens are not those of the model that answers."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from gemserve.config import EngineConfig
from gemserve.contract.events import Filtered, Finished
from gemserve.contract.filter_options import FilterOptions
from gemserve.contract.prompt_parts import StandsFor
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.errors import RequestError
from gemserve.filtering.protected_budget import always_read
from gemserve.filtering.segment_cuts import document_ranges
from gemserve.llm import LLM
from gemserve.prompting.reader_text import ReaderText
from gemserve.synthetic.prose import topics_sentences
from tests.model.test_reader import distrusted, run, unmeasured

SETTINGS = EngineConfig(
    kv_memory_bytes=256 << 20, reader_memory_bytes=256 << 20, filter_min_tokens=256, filter_keep=96
)
QUESTION = "What is the code of the red lamp?"
FACT = "The code of the red lamp is 4715."
PIECES = (
    "def add(first, second):\n    return first + second\n",
    "Ein Igel läuft über die Straße. ",
    "红色的灯在桥上。河水很冷。",
    "🦔🏳️‍🌈 👩‍👩‍👧 e\u0301 \u200b ",
    "one\r\ntwo\r\n\r\nthree\r\n",
    "\t| a | b |\n\t|---|---|\n",
    "<|im_end|> is a mark. ",
    "   \n\n\n   ",
    "Он живёт в доме у реки. ",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ﷽ ",
)


@pytest.fixture(scope="module")
def mixed() -> LLM:
    """The built-in model answers, and SmolLM2 reads."""
    return LLM("builtin", replace(SETTINGS, reader="smollm2"))


def document(seed: int, pieces: int = 120) -> str:
    rng = Random(seed)
    drawn = [rng.choice([*PIECES, rng.choice(topics_sentences()) + " "]) for _ in range(pieces)]
    drawn.insert(rng.randrange(len(drawn)), f"\n\n{FACT}\n\n")
    return "".join(drawn)


def request(llm: LLM, text: str, **options: Any) -> Request:
    sampling = SamplingParams(max_tokens=4, temperature=0.0, ignore_eos=True)
    filtering = FilterOptions(return_selection=True, **options)
    made = llm.request(llm.prompt(f"{text}\n\n{QUESTION}"), sampling, filtering, None)
    return llm.core.planner.planned(made)


def standing(made: Request) -> StandsFor:
    assert made.reading is not None
    assert made.reading.stands_for is not None
    return made.reading.stands_for


@pytest.mark.parametrize("seed", range(200))
def test_each_of_the_readers_tokens_stands_for_the_same_characters(mixed: LLM, seed: int) -> None:
    made = mixed.request(
        mixed.prompt(f"{document(seed)}\n\n{QUESTION}"),
        SamplingParams(max_tokens=4),
        FilterOptions(),
        None,
    )
    written, num_tokens = made.written, len(made.prompt_ids)
    assert written is not None
    tokenizer = mixed.core.reader.tokenizer  # type: ignore[attr-defined]
    ranges = document_ranges(made.protected, made.question, num_tokens)
    translated = ReaderText(tokenizer)(made, ranges)
    stands_for = translated.stands_for
    assert stands_for is not None
    covered = set[int]()
    text = tokenizer.backend_tokenizer.decode(
        list(translated.prompt_ids), skip_special_tokens=False
    )
    assert QUESTION in text
    pairs = zip(stands_for.starts.tolist(), stands_for.stops.tolist(), strict=True)
    for token, (low, high) in zip(translated.prompt_ids, pairs, strict=True):
        assert 0 <= low <= high <= num_tokens
        covered |= set(range(low, high))
        own = tokenizer.backend_tokenizer.decode([token], skip_special_tokens=False)
        if low < high and "\ufffd" not in own:  # which is a part of a character
            assert own.strip() in written.text[written.starts[low] : written.stops[high - 1]]
    documents = {p for low, high in ranges for p in range(low, high)}
    blank = {
        p
        for p in documents - covered
        if not written.text[written.starts[p] : written.stops[p]].strip()
    }
    assert documents - covered <= blank, "all of the text but blanks at its ends"
    between = set(range(num_tokens)) - documents
    assert not (covered & between) or len(ranges) > 1


@pytest.mark.parametrize("seed", range(6))
def test_what_is_kept_is_of_the_prompt_and_what_is_protected_is_whole(
    mixed: LLM, seed: int
) -> None:
    made = request(mixed, document(seed, 200))
    (events,) = run(mixed.core, {mixed.core.add(made): made.request_id}).values()
    (report,) = [event.report for event in events if isinstance(event, Filtered)]
    assert isinstance(events[-1], Finished)
    assert events[-1].reason == "length"
    assert (report.reader, report.prompt_tokens) == ("reader", len(made.prompt_ids))
    assert report.selection is not None
    kept = {p for low, high in report.selection for p in range(low, high)}
    assert kept <= set(range(len(made.prompt_ids)))
    assert set(always_read(made.protected, len(made.prompt_ids))) <= kept
    if report.reason is None:
        assert made.plan is not None
        assert report.kept_tokens <= made.plan.budget.high
        assert FACT in "".join(text for text in kept_texts(mixed, made, report.selection))


def kept_texts(llm: LLM, made: Request, selection: tuple[tuple[int, int], ...]) -> list[str]:
    written = made.written
    assert written is not None
    return [written.text[written.starts[low] : written.stops[high - 1]] for low, high in selection]


def test_a_selection_is_told_in_the_models_own_tokens(mixed: LLM) -> None:
    found = mixed.select(f"{document(1, 200)}\n\n{QUESTION}")
    assert found.filter.reader == "reader"
    assert FACT in "".join(passage.text for passage in found.passages)


def test_separators_of_passages_are_told(mixed: LLM) -> None:
    """They were read and counted nowhere."""
    asked = replace(request(mixed, document(1, 200)), selects_only=True)
    (filtered,) = [e for e in mixed.core.run_alone(asked) if isinstance(e, Filtered)]
    assert filtered.ids is not None
    assert filtered.report.added_tokens > 0
    assert filtered.report.kept_tokens + filtered.report.added_tokens == len(filtered.ids)


@pytest.mark.slow
def test_what_such_a_reader_distrusts_the_model_looks_at_itself(mixed: LLM) -> None:
    made = distrusted(request(mixed, document(2, 200)))
    (events,) = run(mixed.core, {mixed.core.add(made): made.request_id}).values()
    (report,) = [event.report for event in events if isinstance(event, Filtered)]
    assert (report.reason, report.applied, report.reader) == (None, True, "self")


@pytest.mark.slow
def test_what_such_a_reader_distrusts_is_read_whole_without_a_calibration(
    mixed: LLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = distrusted(request(mixed, document(2, 200)))
    unmeasured(mixed.core, monkeypatch)
    (events,) = run(mixed.core, {mixed.core.add(made): made.request_id}).values()
    (report,) = [event.report for event in events if isinstance(event, Filtered)]
    assert (report.reason, report.applied) == ("diffuse_attention", False)
    assert report.kept_tokens == len(made.prompt_ids)


def test_token_ids_need_the_model_itself(mixed: LLM) -> None:
    made = request(mixed, document(3), reader="self")
    planned = replace(made, written=None, filter=replace(made.filter, reader="reader"))
    with pytest.raises(RequestError, match=r"^filter\.reader=reader: it has other tokens"):
        mixed.core.planner.planned(planned)


def test_documents_without_a_prompt_are_read_by_the_model_itself(mixed: LLM) -> None:
    core = mixed.core
    assert core.reads_with is core
    assert core.planner.of_documents is core.planner
    assert core.planner.params_of_documents.reader == "self"
