"""The offline interface answers like the engine beneath it, and says what its filter did."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gemserve.config import EngineConfig
from gemserve.contract.events import Finished, TextDelta
from gemserve.contract.filter_options import FilterOptions
from gemserve.contract.sampling import SamplingParams
from gemserve.errors import PromptTooLong, RequestError
from gemserve.filtering.sieve import Sieve
from gemserve.llm import LLM
from gemserve.prompting.prompt import Prompt

KEEP_64 = FilterOptions(keep=64, fallback=False)
DOCUMENT = " ".join(f"The colour of box {n} is blue." for n in range(40))
PROMPT = f"{DOCUMENT}\n\nWhat is the colour of box 7?"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("builtin", EngineConfig(filter_min_tokens=0, kv_memory_bytes=64 << 20))


def test_an_answer_is_what_was_streamed(llm: LLM) -> None:
    answer = llm.generate(PROMPT, max_tokens=8, filter=KEEP_64)
    events = list(
        llm.stream(
            llm.prompt(PROMPT),
            SamplingParams(max_tokens=8, temperature=0.0),
            filter=KEEP_64,
        )
    )
    assert answer.text == "".join(e.text for e in events if isinstance(e, TextDelta))
    assert isinstance(events[-1], Finished)
    assert answer.finish_reason == events[-1].reason
    assert len(answer.token_ids) == events[-1].completion_tokens
    assert answer.filter.applied


def test_a_selection_is_the_text_that_was_kept(llm: LLM) -> None:
    prompt = llm.prompt(PROMPT)
    selection = llm.select(PROMPT, filter=KEEP_64)
    always = selection.filter.protected_tokens
    assert always > 0
    kept = sum(p.stop - p.start for p in selection.passages)
    assert selection.filter.kept_tokens == kept
    chosen = kept + selection.filter.added_tokens - always
    assert 64 - Sieve().passage_limit(64) < chosen <= 64
    assert "box 7?" in selection.passages[-1].text
    for passage in selection.passages:
        assert passage.text == llm.tokenizer.decode(prompt.ids[passage.start : passage.stop])
    whole = llm.select(PROMPT, filter=FilterOptions(method="none"))
    assert [(p.start, p.stop) for p in whole.passages] == [(0, len(prompt.ids))]


def test_messages_and_strings_are_the_same_prompt(llm: LLM) -> None:
    assert llm.has_chat_template
    assert llm.prompt("Hello").ids == llm.prompt([{"role": "user", "content": "Hello"}]).ids


def test_what_cannot_be_done_is_refused(llm: LLM) -> None:
    with pytest.raises(RequestError, match="keeps other tokens in every layer"):
        llm.select(PROMPT, filter=FilterOptions(method="snapkv", keep=64))
    with pytest.raises(PromptTooLong) as refused:
        llm.generate("word " * (llm.core.config.max_prompt_tokens + 1))
    assert refused.value.param == "prompt"
    with pytest.raises(
        RequestError, match=r"max_tokens=\d+: the context of \d+ tokens leaves room"
    ):
        llm.generate(PROMPT, max_tokens=llm.core.model.context_tokens)


def test_a_filtered_prompt_may_be_longer_than_the_context() -> None:
    """A server admits it, because only the kept tokens must fit; this refused it."""
    config = EngineConfig(filter_min_tokens=0, max_prompt_tokens=40_000, kv_memory_bytes=512 << 20)
    llm = LLM("builtin", config)
    prompt = Prompt(ids=[300] * 35_000, protected=())
    assert len(prompt.ids) > llm.core.model.context_tokens
    sampling = SamplingParams(max_tokens=8)
    assert llm.stream(prompt, sampling, filter=KEEP_64)  # its events are not read: nothing runs
    with pytest.raises(PromptTooLong):
        llm.stream(prompt, sampling, filter=FilterOptions(method="none"))


def test_what_is_closed_leaves_its_folder_to_others(tmp_path: Path) -> None:
    """Its threads and its lock stayed as long as the process."""
    config = EngineConfig(kv_memory_bytes=64 << 20, cache_dir=str(tmp_path))
    before = {*threading.enumerate()}
    for _ in range(2):
        with LLM("builtin", config) as llm:
            assert llm.generate("Hello", max_tokens=1).token_ids
        made = [thread.name for thread in {*threading.enumerate()} - before]
        assert not [name for name in made if name.startswith("gemserve-cache")]


def test_an_adapter_s_positions_are_no_room_for_an_answer(llm: LLM) -> None:
    """A server counts them; an answer that reached the context's end would have had none left."""
    prefix: Any = SimpleNamespace(name="x", version="1", num_positions=10)
    plain, adapted = (
        llm._limits(Prompt(ids=[300] * 50, protected=()), FilterOptions(method="none"), adapter)
        for adapter in (None, prefix)
    )
    assert plain.room - adapted.room == 10
