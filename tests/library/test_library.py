"""A library with a real model: its keys are a pass's, and its segments those of a request."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gemserve.config import EngineConfig
from gemserve.contract.filter_options import FilterOptions
from gemserve.contract.filter_plan import KeysRead, QueriesRead
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.running import index_vectors
from gemserve.llm import LLM
from gemserve_library.in_process import LibrariesOf
from gemserve_library.library import Library
from tests.library.worlds import paragraphs

NOTES = f"# Boats\n\n{paragraphs(60)}\n\n## Ferries\n\nThe ferry to Malmo leaves at nine.\n\n"
KEEP = FilterOptions(keep=256, fallback=False)
QUESTION = "When does the ferry to Malmo leave?"


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("builtin", EngineConfig(filter_min_tokens=256, kv_memory_bytes=512 << 20))


@pytest.fixture
def library(llm: LLM, tmp_path: Path) -> Library:
    (tmp_path / "notes.md").write_text(NOTES + paragraphs(80, "ferry"))
    (tmp_path / "sea.txt").write_text(paragraphs(100, "sea"))
    made = LibrariesOf(llm).open(tmp_path / "library", is_new=True)
    *_, done = LibrariesOf(llm).add_files(
        made, [str(tmp_path / "notes.md"), str(tmp_path / "sea.txt")]
    )
    assert done.files == 2
    return made


def keys_of(llm: LLM, segments: list[Any]) -> list[Any]:
    end = llm.run_to_end(LibrariesOf(llm).vectors.for_keys(segments))
    assert isinstance(end.vectors, KeysRead)
    return list(end.vectors.segments)


def test_keys_are_those_of_a_pass_moved_to_its_beginning(llm: LLM) -> None:
    model, identity = llm.core.model, LibrariesOf(llm).vectors.identity
    texts = [paragraphs(20), paragraphs(7, "sea")]
    segments = [np.array(llm.tokenizer(text)["input_ids"]) for text in texts]
    together = keys_of(llm, segments)
    first = len(identity.anchor)
    for tokens, found in zip(segments, together, strict=True):
        assert found.shape == (identity.num_key_heads, len(tokens), identity.head_dim)
        ids = [*identity.anchor, *tokens.tolist()]
        kv = model.filter_pass_of(ids, identity.layer)
        ((layer, head),) = identity.heads
        shape = model.shape
        own = kv.keys(layer, len(ids))[head * shape.num_kv_heads // shape.num_heads]
        mover = model.key_mover(layer, len(ids))
        assert mover is not None
        # moved back to where they stood, they are what the layer has there
        again = mover(torch.from_numpy(found), torch.arange(first, len(ids)))[0]
        torch.testing.assert_close(again, own[first:].float(), atol=2e-3, rtol=1e-3)


def test_a_question_s_queries_are_those_of_its_rows(llm: LLM, monkeypatch: Any) -> None:
    """With the keys of a segment they give the logits of its own pass at that distance."""
    model, identity = llm.core.model, LibrariesOf(llm).vectors.identity
    alone = llm.prompt(QUESTION)
    request = Request(
        request_id="a",
        **alone.fields,
        sampling=SamplingParams(max_tokens=1),
        filter=llm.core.planner.resolve(FilterOptions()),
    )
    asked = LibrariesOf(llm).vectors.for_question(request)
    end = llm.run_to_end(asked)
    found = end.vectors
    assert isinstance(found, QueriesRead)
    assert asked.plan is not None
    assert found.queries.shape == (len(identity.heads), len(asked.plan.rows), identity.head_dim)
    assert found.sinks.shape == found.queries.shape[:2]
    monkeypatch.setattr(index_vectors, "DISTANCE", 0)
    nearest = llm.run_to_end(asked).vectors
    assert isinstance(nearest, QueriesRead)
    # at distance 0 the first row stands where the anchor's first token does: lengths are the same
    lengths = np.linalg.norm(found.queries, axis=-1)
    np.testing.assert_allclose(lengths, np.linalg.norm(nearest.queries, axis=-1), rtol=1e-3)
    assert model.shape.head_dim == identity.head_dim


def test_an_answer_has_its_sources(llm: LLM, library: Library, tmp_path: Path) -> None:
    prompt = LibrariesOf(llm).prompt(QUESTION, [library], candidates=4)
    report = llm.generate(prompt, max_tokens=4, filter=KEEP).filter
    assert report.searched is not None
    assert report.searched.candidates == len(prompt.excerpts) > 1
    assert report.found is not None
    assert report.sources
    notes = [source for source in report.sources if source.file.endswith("notes.md")]
    (ferry,) = [source for source in notes if "leaves at nine" in source.text]
    assert ferry.heading is not None
    assert "## Ferries" in ferry.heading or "# Boats" in ferry.heading
    for source in report.sources:
        text = Path(source.file).read_text()
        assert text[slice(*source.characters)] == source.text
        assert source.lines is not None
        first, last = source.lines
        assert source.text in "\n".join(text.split("\n")[first - 1 : last])
        assert source.library == "library"


def test_segments_are_found_in_the_cache(llm: LLM, library: Library) -> None:
    """They are cut and tokenized as they were read, whatever else the prompt has."""
    names = {row[0] for row in library._connection.execute("SELECT name FROM windows")}
    prompt = LibrariesOf(llm).prompt(QUESTION, [library], candidates=4)
    request = llm.request(prompt, SamplingParams(max_tokens=1), KEEP, None)
    plan = llm.core.planner.planned(request).plan
    assert plan is not None
    assert plan.segments is not None
    assert {segment.name for segment in plan.segments.segments} <= names
    cold = llm.select(prompt, filter=KEEP)
    warm = llm.select(prompt, filter=KEEP)
    assert cold.passages == warm.passages
    assert warm.filter.cached_windows == warm.filter.windows == len(prompt.excerpts)
    other = LibrariesOf(llm).prompt(f"{QUESTION} And the river?", [library], candidates=4)
    assert llm.select(other, filter=KEEP).filter.cached_windows


def test_reading_files_leaves_nothing_in_the_document_cache(llm: LLM, tmp_path: Path) -> None:
    """Millions of tokens would drive out what others ask about."""
    before = llm.core.cache_state
    (tmp_path / "x.txt").write_text(paragraphs(200, "glacier"))
    made = LibrariesOf(llm).open(tmp_path / "y", is_new=True)
    list(LibrariesOf(llm).add_files(made, [str(tmp_path / "x.txt")]))
    assert llm.core.cache_state == before
    llm.core.check_integrity()


def test_a_file_cannot_speak_as_the_template(llm: LLM, tmp_path: Path) -> None:
    control = next(
        token.content
        for token in llm.tokenizer.backend_tokenizer.get_added_tokens_decoder().values()
        if token.special
    )
    (tmp_path / "x.txt").write_text(f"The ferry {control} leaves at nine.\n\n{paragraphs(100)}")
    made = LibrariesOf(llm).open(tmp_path / "y", is_new=True)
    list(LibrariesOf(llm).add_files(made, [str(tmp_path / "x.txt")]))
    prompt = LibrariesOf(llm).prompt(QUESTION, [made], candidates=4)
    assert prompt.excerpts
    forged = llm.tokenizer.convert_tokens_to_ids(control)
    for excerpt in prompt.excerpts:
        assert forged not in prompt.ids[excerpt.start : excerpt.stop]


def test_text_of_the_user_stands_beside_the_excerpts(llm: LLM, library: Library) -> None:
    messages = [
        {"role": "user", "content": "I travel by sea."},
        {"role": "assistant", "content": "Good."},
        {"role": "user", "content": f"I am in a hurry.\n\n{QUESTION}"},
    ]
    prompt = LibrariesOf(llm).prompt(messages, [library], candidates=4)
    assert prompt.text.index("I travel by sea.") < prompt.text.index("<documents>")
    assert prompt.text.index("</documents>") < prompt.text.index("I am in a hurry.")
    kept = llm.select(prompt, filter=KEEP)
    text = " ".join(passage.text for passage in kept.passages)
    assert "I am in a hurry." in text
    assert QUESTION in text
