"""The text that a model answers from: whole passages, apart where they were not neighbours."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from gemserve.api.serving import build_serving
from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve.engine.build import build_core
from gemserve_client import GemserveClient, replies
from tests.fakes import live_server

KEEP = 128
RIVER = "The river runs past the houses, they say; nobody counts them."
FACTS = ("The code for the lantern is 48213.", "The code for the anchor is 90671.")
FILLER = [RIVER] * 30
SENTENCES = [*FILLER, FACTS[0], *FILLER, FACTS[1], *FILLER]
QUESTION = "What are the codes for the lantern and the anchor?"


@pytest.fixture(scope="module")
def client() -> Iterator[GemserveClient]:
    config = EngineConfig(kv_memory_bytes=1 << 28, filter_min_tokens=256, filter_layer=2)
    core = build_core(ModelConfig(device="cpu", dtype="float32"), config)
    with (
        live_server(build_serving(core, model_name="builtin", config=ServerConfig())) as address,
        GemserveClient(base_url=address, max_retries=0, timeout=100) as opened,
    ):
        yield opened


def kept_of(
    client: GemserveClient, prompt: str, keep: int = KEEP, **options: Any
) -> replies.Selection:
    asked: Any = {"keep": keep, "fallback": False, "return_selection": True, **options}
    kept = client.filter(model="builtin", prompt=prompt, filter=asked)
    report = kept.filter
    assert report.applied
    chosen = report.kept_tokens - report.protected_tokens
    assert 0 < chosen + report.added_tokens <= keep
    return kept


def pieces_of(tokenizer: Any, prompt: str, kept: replies.Selection) -> list[str]:
    """The text of each range that was kept."""
    ids = tokenizer.encode(prompt)
    assert len(ids) == kept.filter.prompt_tokens
    assert kept.filter.selection is not None
    ranges = kept.filter.selection
    assert sum(stop - start for start, stop in ranges) == kept.filter.kept_tokens
    return [tokenizer.decode(ids[start:stop], skip_special_tokens=True) for start, stop in ranges]


@pytest.mark.parametrize("window", [256, "off"])
def test_a_blank_line_stands_between_passages_that_were_not_neighbours(
    client: GemserveClient, tokenizer: Any, window: int | str
) -> None:
    """A small model read sentences that ran into each other as one."""
    prompt = f"{' '.join(SENTENCES)}\n\n{QUESTION}"
    kept = kept_of(client, prompt, window=window)
    *passages, question = pieces_of(tokenizer, prompt, kept)
    assert question.strip().endswith(QUESTION)
    assert len(passages) >= 2
    # what is always read has a line's end of its own
    assert kept.text == "\n\n".join(passages) + question
    blank_line = len(tokenizer.encode("a\n\n", add_special_tokens=False)) - 1
    assert kept.filter.added_tokens == (len(passages) - 1) * blank_line > 0
    sentences = {each.strip() for each in kept.text.replace(". ", ".\n\n").split("\n\n")}
    assert {*FACTS, QUESTION} <= sentences <= {*SENTENCES, QUESTION}


def test_paragraphs_have_their_blank_lines(client: GemserveClient, tokenizer: Any) -> None:
    paragraphs = [f"Page {n}. {RIVER}" for n in range(60)]
    paragraphs[10], paragraphs[30] = (f"{fact} They say so often, and it is so." for fact in FACTS)
    prompt = "\n\n".join([*paragraphs, QUESTION])
    kept = kept_of(client, prompt, keep=256)
    pieces = pieces_of(tokenizer, prompt, kept)
    assert len(pieces) >= 3
    assert kept.text == "".join(pieces)
    assert kept.filter.added_tokens == 0
    assert set(kept.text.split("\n\n")) <= {*paragraphs, QUESTION}
    assert all(fact in kept.text for fact in FACTS)


def test_a_method_that_keeps_single_tokens_separates_none(
    client: GemserveClient, tokenizer: Any
) -> None:
    prompt = f"{' '.join(SENTENCES)}\n\n{QUESTION}"
    asked: Any = {"method": "gemfilter", "keep": KEEP, "return_selection": True}
    kept = client.filter(model="builtin", prompt=prompt, filter=asked)
    assert (kept.filter.kept_tokens, kept.filter.added_tokens) == (KEEP, 0)
    assert "\n\n" not in kept.text.removesuffix(f"\n\n{QUESTION}")
    assert len(pieces_of(tokenizer, prompt, kept)) > 1
