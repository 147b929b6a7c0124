"""One reading of a prompt that shows what a filter at any layer would see."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from gemserve.engine.core import Core
from gemserve.filtering.selector import Evidence, LayerEvidence
from gemserve.model.kv import KVSpan
from gemserve.prompting.prompt import Prompt

_CHUNK = 512


def observe(
    core: Core, prompts: Sequence[Prompt], rows: Sequence[Sequence[int]]
) -> Iterator[Evidence]:
    """Evidence of every prompt, in all layers without windows, from the queries at its `rows`.

    Where all layers have sliding windows, it is of those whose window holds this prompt.

    Prompts that begin alike are read from where they differ: a document once, whatever is asked of
    it. All layers run, so a prompt costs as much as answering it unfiltered. Each evidence is good
    until the next one is asked for.
    """
    model = core.model
    capacity = max(len(prompt.ids) for prompt in prompts)
    memory = model.new_memory(2 * model.num_layers * capacity)
    kv = memory.kv(0, num_layers=model.num_layers, capacity=capacity)
    known: Sequence[int] = ()
    for prompt, wanted in zip(prompts, rows, strict=True):
        shared = _num_shared(known, prompt.ids)
        # a row whose queries are wanted must run, even if its keys are known
        start = min(shared, *wanted) if wanted else shared
        yield _read(core, prompt, wanted, kv, start)
        known = prompt.ids


def _read(core: Core, prompt: Prompt, rows: Sequence[int], kv: KVSpan, start: int) -> Evidence:
    model, ids, num_tokens = core.model, prompt.ids, len(prompt.ids)
    windows = list(enumerate(model.sliding_windows))
    layers = [layer for layer, window in windows if window is None]
    if not layers:
        layers = [layer for layer, window in windows if window and window >= num_tokens]
    tap = model.new_query_tap(layers, rows)
    for low in range(start, num_tokens, _CHUNK):
        chunk = ids[low : low + _CHUNK]
        model.prefill_chunk(
            chunk, start=low, kv=kv, rope_tokens=num_tokens, is_last=False, query_tap=tap
        )
    with torch.inference_mode():
        return Evidence(
            num_tokens=num_tokens,
            layers={
                layer: LayerEvidence(
                    queries=tap.of(layer),
                    keys=kv.read(layer, num_tokens)[0],
                    scale=tap.scales[layer],
                    softcap=tap.softcaps[layer],
                )
                for layer in layers
            },
            rows=tap.rows,
            backend=model.backend,
            protected=prompt.protected,
            breaks=prompt.breaks,
        )


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens two prompts begin alike with."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
