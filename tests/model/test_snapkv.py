"""snapkv against an independent transcription over a stock model's own attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AttentionInterface

from gemserve.config import EngineConfig
from gemserve.contract.events import Filtered, Finished, TextDelta
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.engine.running.snapkv_eviction import evict
from gemserve.filtering.snapkv import SnapKV
from gemserve.model.passes.causal_model import CausalModel
from tests import models
from tests.cores import core_over
from tests.model.test_selection import NoText


class Cache:
    """Per layer: all keys and values while reading, then what SnapKV keeps and what came after."""

    def __init__(self, keep: int) -> None:
        self.keep = keep
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}


def snapkv_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    cache: Cache | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    assert cache is not None
    q, k, v = query[0], key[0], value[0]  # [heads, rows, dim]
    scale = scaling if scaling is not None else q.shape[-1] ** -0.5
    rows, group = q.shape[1], q.shape[0] // k.shape[0]
    is_prefill = module.layer_idx not in cache.layers
    if not is_prefill:
        old_k, old_v = cache.layers[module.layer_idx]
        k, v = torch.cat([old_k, k], dim=1), torch.cat([old_v, v], dim=1)
    wide_k, wide_v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ wide_k.transpose(1, 2) * scale
    if is_prefill:
        scores = scores.masked_fill(torch.ones(rows, rows).triu(1).bool(), -torch.inf)
    weights = scores.softmax(-1)
    out = weights @ wide_v
    if is_prefill:  # SnapKV, section 4: the last rows vote, pooled; each key head keeps its own
        window = min(32, cache.keep)
        votes = weights[:, -32:, : rows - window].sum(1)
        votes = votes.view(k.shape[0], group, -1).sum(1, keepdim=True)
        smooth = torch.nn.functional.avg_pool1d(votes, 5, stride=1, padding=2)[:, 0]
        kept_k, kept_v = [], []
        for head in range(k.shape[0]):
            best = smooth[head].topk(cache.keep - window).indices.tolist()
            kept = sorted(best) + list(range(rows - window, rows))
            kept_k.append(k[head, kept])
            kept_v.append(v[head, kept])
        k, v = torch.stack(kept_k), torch.stack(kept_v)
    cache.layers[module.layer_idx] = (k, v)
    return out.transpose(0, 1).unsqueeze(0), None


AttentionInterface.register("snapkv_transcription", snapkv_attention)


def transcription(model: Any, ids: list[int], keep: int, count: int) -> list[int]:
    """Greedy tokens after reading `ids` whole and keeping `keep` per layer and key head."""
    model.config._attn_implementation = "snapkv_transcription"
    cache = Cache(keep)
    tokens: list[int] = []
    given, positions = ids, list(range(len(ids)))
    for _ in range(count):
        with torch.inference_mode():
            logits = model(
                input_ids=torch.tensor([given]),
                position_ids=torch.tensor([positions]),
                use_cache=False,
                cache=cache,
            ).logits
        tokens.append(int(logits[0, -1].argmax()))
        given, positions = [tokens[-1]], [positions[-1] + 1]
    return tokens


@pytest.mark.parametrize("name", ["llama", "qwen3"])
@pytest.mark.parametrize(("keep", "max_tokens"), [(64, 10), (64, 400), (20, 6), (250, 8)])
def test_greedy_answers_equal_the_transcription(name: str, keep: int, max_tokens: int) -> None:
    """Also where the answer may grow longer than the prompt, so that the packed copy does."""
    generator = torch.Generator().manual_seed(5)
    ids = torch.randint(6, models.VOCAB, (300,), generator=generator).tolist()
    core = core_over(
        CausalModel(models.build(name)),
        NoText(),
        EngineConfig(
            kv_memory_bytes=32 << 20, filter_min_tokens=0, filter_layer=2, step_target_s=1e-4
        ),
        eos_ids=frozenset(),
    )
    request = Request(
        request_id="r",
        prompt_ids=ids,
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        filter=FilterParams(method="snapkv", keep=keep, return_selection=True),
    )
    neighbour = Request(
        request_id="n",
        prompt_ids=ids[:40],
        sampling=SamplingParams(max_tokens=max_tokens, temperature=0.0),
        filter=FilterParams(method="none", keep=16),
    )
    job = core.add(request)
    core.add(neighbour)
    tokens: list[int] = []
    report = None
    while not core.is_idle:
        for owner, event in core.step():
            if owner is not job:
                continue
            if isinstance(event, Filtered):
                report = event.report
            elif isinstance(event, TextDelta):
                assert report is not None
                tokens += event.token_ids
            else:
                assert isinstance(event, Finished)
                assert event.error is None
        core.check_integrity()
    assert report is not None
    assert report.applied
    assert report.kept_tokens == keep
    assert report.selection is None
    checked = min(max_tokens, 10)
    assert tokens[:checked] == transcription(models.build(name), ids, keep, checked)


def test_every_layer_chooses_by_its_own_queries_scale_and_softcap() -> None:
    """Whoever evicts: the engine and the evaluation once had a loop each."""
    model = CausalModel(models.build("llama"))
    torch.manual_seed(0)
    heads, dim, layers, num_tokens, keep = model.shape.num_kv_heads, 16, model.num_layers, 90, 40
    source = model.new_memory(2 * layers * 100).kv(0, num_layers=layers, capacity=100)
    target = model.new_memory(2 * layers * 60).kv(0, num_layers=layers, capacity=60)
    tap = model.new_query_tap(range(layers), range(num_tokens - 8, num_tokens))
    for layer in range(layers):
        key, value = torch.randn(2, heads, num_tokens, dim)
        source.write(layer, 0, key, value)
        tap.queries[layer] = torch.randn(model.shape.num_heads, 8, dim)
        tap.scales[layer] = 0.02 * 10**layer
        tap.softcaps[layer] = 0.5 if layer % 2 else None

    snapkv = SnapKV(observed=8)
    evict(snapkv, tap, source, num_tokens, keep, target, model.backend)
    for layer in range(layers):
        keys, values = source.read(layer, num_tokens)
        options = {"scale": tap.scales[layer], "softcap": tap.softcaps[layer]}
        chosen = snapkv.select(tap.queries[layer], keys, keep, model.backend, **options)
        index = chosen.unsqueeze(-1).expand(-1, -1, dim)
        packed_keys, packed_values = target.read(layer, keep)
        assert torch.equal(packed_keys, keys.gather(1, index))
        assert torch.equal(packed_values, values.gather(1, index))
