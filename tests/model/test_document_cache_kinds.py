"""What keys depend on besides the tokens: whatever it is, the cache answers as a cold server."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from gemserve.adapters.kinds import load_adapter
from gemserve.contract.requests import Request
from gemserve.engine.core import Core
from gemserve.model.adapter import Adapter
from gemserve.model.base_model import base_of
from tests import adapters, models
from tests.model.test_document_cache import (
    answer_of,
    cached_tokens,
    core_of,
    random_ids,
    request,
)

KINDS = ["prefix", "ntk", "activation", "lora"]


def loaded(core: Core, folder: Path, kind: str, seed: int) -> Adapter:
    if kind == "lora":
        adapters.write_lora(folder, models.build("llama"), seed, target_modules=["k_proj"])
    else:
        adapters.write(folder, kind, core.model, seed)
    return load_adapter("style", folder, core.model, base_of(core.model), 1 << 24)


@pytest.mark.parametrize("is_whole", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_one_name_share_nothing(kind: str, is_whole: bool, tmp_path: Path) -> None:
    """A document of the base model, or of the adapter before a reload, is another document."""
    warm, cold = (core_of("llama", tokens=40_000, cache_memory=share) for share in (0.5, 0.0))
    document = random_ids(Random(7), 500)
    versions = {seed: f"{kind}-{seed}" for seed in (1, 2)}
    found = []
    for turn in range(2):
        for seed in (None, 1, 2):
            ids = document + random_ids(Random(turn), 30)
            answers = []
            for core in (warm, cold):
                adapter = None
                if seed is not None:
                    adapter = loaded(core, tmp_path / versions[seed], kind, seed)
                asked = request(ids, adapter=adapter)
                events = list(core.run_alone(whole(asked) if is_whole else asked))
                answers.append(answer_of(events))
                if core is warm:
                    found.append(cached_tokens(events))
            assert answers[0] == answers[1]
    assert found == [0, 0, 0, 500, 500, 500]
    warm.check_integrity()


def whole(asked: Request) -> Request:
    return replace(asked, filter=replace(asked.filter, method="none"))


def unfiltered(ids: list[int]) -> Request:
    return whole(request(ids))


def repeated(ids: list[int]) -> Request:
    """The question comes first, so the filter pass reads it once more behind the prompt."""
    return replace(request(ids), question=((0, 10),))


def gemfilter(ids: list[int]) -> Request:
    made = request(ids)
    return replace(made, filter=replace(made.filter, method="gemfilter"))


def lowest_layer(ids: list[int]) -> Request:
    made = request(ids)
    return replace(made, filter=replace(made.filter, layer=0))


@pytest.mark.parametrize(
    ("name", "ask"),
    [
        *(("llama", ask) for ask in (repeated, gemfilter, lowest_layer, unfiltered)),
        *(("qwen2-window", ask) for ask in (repeated, gemfilter, unfiltered)),
        *((name, unfiltered) for name in ("mistral", "qwen3")),
    ],
)
def test_every_way_to_ask(name: str, ask: Callable[[list[int]], Request]) -> None:
    warm, cold = (core_of(name, tokens=60_000, cache_memory=0.5 * is_warm) for is_warm in (1, 0))
    rng = Random(8)
    document = random_ids(rng, 600)
    found = []
    for _ in range(3):
        asked = ask(document + random_ids(rng, 30))
        events = list(warm.run_alone(asked))
        assert answer_of(events) == answer_of(list(cold.run_alone(asked)))
        found.append(cached_tokens(events))
    assert found == [0, 600, 600]
    again = ask(document + [5] * 30)
    first, second = (answer_of(list(warm.run_alone(again))) for _ in range(2))
    assert first == second
    warm.check_integrity()


def test_a_prompt_longer_than_the_context_goes_on_from_a_document() -> None:
    warm, cold = (core_of("llama", tokens=100_000, cache_memory=share) for share in (0.5, 0.0))
    rng = Random(9)
    document = random_ids(rng, models.SIZES["max_position_embeddings"] + 100)
    for turn in range(2):
        asked = request(document + random_ids(rng, 20))
        events = list(warm.run_alone(asked))
        assert answer_of(events) == answer_of(list(cold.run_alone(asked)))
        assert cached_tokens(events) == turn * len(document)
