"""GemFilter's selection against a transcription of Algorithm 2 that shares no code with it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from gemserve.config import EngineConfig
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.filter_plan import Budget
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.cost import filter_units
from gemserve.errors import ModelError
from gemserve.filtering.gemfilter import GemFilter
from gemserve.filtering.selector import Evidence, LayerEvidence
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.query_tap import FilterTap
from tests import models
from tests.cores import core_over

LAYER = 2
KEEP = 48
BUDGET = Budget(low=KEEP, high=KEEP, limit=KEEP)
PARAMS = FilterParams(method="gemfilter", keep=KEEP)


def transcribed_scores(hf: Any, ids: list[int], layer: int) -> list[float]:
    """Algorithm 2 over eager attention: the whole prompt at once, every head written out."""
    seen: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def eager(
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any,
        scaling: float,
        sliding_window: int | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        seen[module.layer_idx] = (query[0], key[0])
        group = query.shape[1] // key.shape[1]
        key, value = (torch.repeat_interleave(t, group, dim=1) for t in (key, value))
        scores = query @ key.transpose(2, 3) * scaling
        i = torch.arange(query.shape[2])
        hidden = i[None, :] > i[:, None]
        if sliding_window is not None:
            hidden |= i[None, :] <= i[:, None] - sliding_window
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        return (weights @ value).transpose(1, 2), None

    AttentionInterface.register("transcription", eager)
    hf.config._attn_implementation = "transcription"
    with torch.no_grad():
        hf(input_ids=torch.tensor([ids]), use_cache=False)
    query, key = seen[layer]
    raw = [0.0] * len(ids)
    for head in range(query.shape[0]):
        shared = key[head // (query.shape[0] // key.shape[0])]
        for j, dot in enumerate((shared.double() @ query[head, -1].double()).tolist()):
            raw[j] += dot
    padded = [0.0, 0.0, *raw, 0.0, 0.0]
    return [sum(padded[j : j + 5]) / 5 for j in range(len(raw))]


def top(scores: list[float], k: int) -> list[int]:
    return sorted(sorted(range(len(scores)), key=lambda j: -scores[j])[:k])


def assert_same_up_to_ties(actual: list[int], scores: list[float], k: int) -> None:
    """Selections may differ only where scores tie with the last one kept."""
    expected = top(scores, k)
    spread = max(scores) - min(scores)
    border = min(scores[j] for j in expected)
    assert len(actual) == len(set(actual)) == k
    assert actual == sorted(actual)
    for j in set(actual) ^ set(expected):
        assert abs(scores[j] - border) <= 1e-5 * spread, (j, scores[j], border, spread)


class FilterPass:
    """A chunked filter pass that a test can advance step by step."""

    def __init__(self, model: CausalModel, ids: list[int], chunk: int) -> None:
        self.model, self.ids, self.chunk = model, ids, chunk
        units = filter_units(LAYER)
        memory = model.new_memory(units * len(ids))
        self.kv = memory.pass_kv(0, num_units=units, capacity=len(ids))
        queries = model.new_query_tap([LAYER], GemFilter().rows(len(ids), (), True))
        self.tap = FilterTap(layer=LAYER, queries=queries, num_tokens=len(ids))

    def steps(self) -> Iterator[None]:
        for start in range(0, len(self.ids), self.chunk):
            ids = self.ids[start : start + self.chunk]
            self.model.filter_chunk(ids, start=start, kv=self.kv, tap=self.tap)
            yield

    def selection(self) -> list[int]:
        queries = self.tap.queries
        layer = LayerEvidence(
            queries=queries.of(LAYER),
            keys=self.kv.keys(LAYER, len(self.ids)),
            scale=queries.scales[LAYER],
            softcap=queries.softcaps[LAYER],
        )
        evidence = Evidence(
            num_tokens=len(self.ids),
            layers={LAYER: layer},
            rows=queries.rows,
            backend=self.model.backend,
            protected=(),
        )
        return list(GemFilter().choose(evidence, BUDGET, PARAMS).positions.tolist())


def random_ids(count: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, models.VOCAB, (count,), generator=generator).tolist()


@pytest.mark.parametrize("chunk", [1, 7, 512, 10_000])
@pytest.mark.parametrize("name", models.ARCHITECTURES)
def test_selection_is_algorithm_2(name: str, chunk: int) -> None:
    ids = random_ids(150 if chunk == 1 else 611, seed=1)
    scores = transcribed_scores(models.build(name), ids, LAYER)
    run = FilterPass(CausalModel(models.build(name)), ids, chunk)
    for _ in run.steps():
        pass
    assert_same_up_to_ties(run.selection(), scores, KEEP)


@pytest.mark.parametrize("chunk", [1, 7, 64, 10_000])
def test_lower_layers_keep_their_window(chunk: int) -> None:
    """The layers below a filter layer that sees everything."""
    ids = random_ids(180 if chunk == 1 else 400, seed=2)
    scores = transcribed_scores(models.build("qwen2-window"), ids, LAYER)
    model = CausalModel(models.build("qwen2-window"))
    assert model.sliding_windows[: LAYER + 1] == (100, 100, None)
    run = FilterPass(model, ids, chunk)
    for _ in run.steps():
        pass
    assert_same_up_to_ties(run.selection(), scores, KEEP)


def test_a_windowed_filter_layer_is_refused() -> None:
    """It has not seen the start of the prompt: its scores would mean nothing there."""
    run = FilterPass(CausalModel(models.build("mistral-window")), random_ids(400, 3), 64)
    with pytest.raises(ModelError, match="sees only the last 100 tokens"):
        for _ in run.steps():
            pass


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("offset", [-2, -1, 0, 1, 2, 100])
def test_longrope_decides_by_the_whole_prompt(offset: int, chunk: int) -> None:
    """transformers picks factors per forward call: chunked, the first chunks got the short ones."""
    ids = random_ids(models.LONGROPE_SWITCH + offset, seed=4)
    scores = transcribed_scores(models.build("phi3-longrope"), ids, LAYER)
    run = FilterPass(CausalModel(models.build("phi3-longrope")), ids, chunk)
    for _ in run.steps():
        pass
    assert_same_up_to_ties(run.selection(), scores, KEEP)


@pytest.mark.parametrize("name", ["phi3-longrope", "llama-dynamic"])
def test_neighbours_do_not_change_each_others_rope(name: str) -> None:
    """The factors were written to the shared module: a long neighbour changed a short request."""
    model = CausalModel(models.build(name))
    lengths = (models.LONGROPE_SWITCH - 30, models.LONGROPE_SWITCH + 300, 90)
    prompts = [random_ids(length, seed=length) for length in lengths]
    together = [FilterPass(model, ids, 16) for ids in prompts]
    pending = [run.steps() for run in together]
    while pending:
        pending = [steps for steps in pending if next(steps, StopIteration) is not StopIteration]
    for ids, run in zip(prompts, together, strict=True):
        alone = FilterPass(CausalModel(models.build(name)), ids, 16)
        for _ in alone.steps():
            pass
        assert run.selection() == alone.selection()


@pytest.mark.parametrize("name", [*models.ARCHITECTURES, "mistral-window", "llama-dynamic"])
def test_generation_equals_transformers(name: str) -> None:
    """Chunked prefill and decode give transformers' own greedy tokens."""
    ids = random_ids(140, seed=5)
    hf = models.build(name)
    hf.generation_config.eos_token_id = None
    # one forward over everything fixes length-dependent rope as a request's final length does
    expected = list(ids)
    for _ in range(12):
        with torch.no_grad():
            hf.config._attn_implementation = "eager"
            logits = hf(input_ids=torch.tensor([expected]), use_cache=False).logits[0, -1]
        expected.append(int(logits.argmax()))
    core = core_over(
        CausalModel(models.build(name)),
        NoText(),
        EngineConfig(min_chunk_tokens=32, kv_memory_bytes=1 << 20, filter_layer=LAYER),
        eos_ids=frozenset(),
    )
    request = Request(
        request_id="r",
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=12, temperature=0.0),
        filter=FilterParams(method="none", keep=64),
    )
    drawn = [
        token for event in core.run_alone(request) for token in getattr(event, "token_ids", ())
    ]
    assert drawn == expected[len(ids) :]


class NoText:
    """A tokenizer whose text nobody reads."""

    def __init__(self) -> None:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers

        vocabulary = {f"t{i}": i for i in range(4096)}
        self.backend_tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="t0"))
        self.backend_tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        self.backend_tokenizer.decoder = decoders.WordPiece()
