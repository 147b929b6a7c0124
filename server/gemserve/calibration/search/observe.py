"""Reads a prompt once and returns what a filter at any layer would see of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from gemserve.cost import filter_units
from gemserve.engine.core import Core
from gemserve.filtering.selector import Evidence, LayerEvidence
from gemserve.model.passes.attention import NO_PAUSES, Breaks
from gemserve.model.passes.kv import KVSpan
from gemserve.model.passes.query_tap import FilterTap
from gemserve.model.passes.recurrent_state import SequenceState
from gemserve.prompting.prompt import Prompt

_CHUNK_TOKENS = 512


def observe(
    core: Core,
    prompts: Sequence[Prompt],
    rows: Sequence[Sequence[int]],
    deepest: int | None = None,
    breaks: Breaks = NO_PAUSES,
) -> Iterator[Evidence]:
    """The evidence of each prompt: the queries at its `rows` in all layers without a window.

    If all layers have sliding windows, the layers are those whose window holds the prompt. The pass
    ends at layer `deepest` (None: the last one), or at the first of these layers behind it. Only
    the part of a prompt that differs from the one before is read, so a document with several
    questions is read once, unless layers keep a recurrent state. The next evidence from the
    iterator overwrites the last one.
    """
    model = core.model
    deepest = model.num_layers - 1 if deepest is None else deepest
    capacity = max(len(prompt.ids) for prompt in prompts)
    windows = list(enumerate(model.sliding_windows))
    seeing = [layer for layer, window in windows if window is None]
    if not seeing:
        seeing = [layer for layer, window in windows if window and window >= capacity]
    layers = [layer for layer in seeing if layer <= deepest] or seeing[:1]
    num_units = filter_units(model.shape.kv_index(max(layers)))
    memory = model.new_memory(num_units * capacity)
    kv = memory.pass_kv(0, num_units=num_units, capacity=capacity)
    state = model.new_states(1).take() if model.has_states else None
    previous: Sequence[int] = ()
    for prompt, wanted in zip(prompts, rows, strict=True):
        shared = _num_shared(previous, prompt.ids)
        # a row whose queries are needed must run, even if its keys are there already
        start = min(shared, *wanted) if wanted else shared
        start = 0 if model.has_states else start
        yield _read(core, prompt, layers, wanted, kv, start, state, breaks)
        previous = prompt.ids


def _read(
    core: Core,
    prompt: Prompt,
    layers: Sequence[int],
    rows: Sequence[int],
    kv: KVSpan,
    start: int,
    state: SequenceState | None,
    breaks: Breaks,
) -> Evidence:
    model, ids, num_tokens = core.model, prompt.ids, len(prompt.ids)
    queries = model.new_query_tap(layers, rows)
    model.key_mover(max(layers), num_tokens)  # one pass tries all layers
    tap = FilterTap(layer=max(layers), queries=queries, num_tokens=num_tokens)
    for low in range(start, num_tokens, _CHUNK_TOKENS):
        chunk = ids[low : low + _CHUNK_TOKENS]
        model.filter_chunk(chunk, start=low, kv=kv, tap=tap, breaks=breaks, state=state)
    with torch.inference_mode():
        return Evidence(
            num_tokens=num_tokens,
            layers={
                layer: LayerEvidence(
                    queries=queries.of(layer),
                    keys=kv.keys(layer, num_tokens),
                    scale=queries.scales[layer],
                    softcap=queries.softcaps[layer],
                    move_keys=model.key_mover(layer, num_tokens),
                )
                for layer in layers
            },
            rows=queries.rows,
            backend=model.backend,
            protected=prompt.protected,
            breaks=prompt.breaks,
        )


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens that two prompts have in common at their beginnings."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
