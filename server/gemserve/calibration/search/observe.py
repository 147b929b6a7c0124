"""Reads a prompt once and returns what a filter at any layer would see of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from gemserve.engine.core import Core
from gemserve.evaluation.prefill import prefill
from gemserve.filtering.selector import Evidence, LayerEvidence
from gemserve.model.kv import KVSpan
from gemserve.model.recurrent_state import SequenceState
from gemserve.prompting.prompt import Prompt


def observe(
    core: Core, prompts: Sequence[Prompt], rows: Sequence[Sequence[int]]
) -> Iterator[Evidence]:
    """The evidence of each prompt: the queries at its `rows` in all layers without a window.

    If all layers have sliding windows, the layers are those whose window holds the prompt. Only the
    part of a prompt that differs from the one before is read, so a document with several questions
    is read once, unless layers keep a recurrent state. All layers run, so a prompt costs as much as
    an unfiltered answer. The next evidence from the iterator overwrites the last one.
    """
    model = core.model
    capacity = max(len(prompt.ids) for prompt in prompts)
    memory = model.new_memory(2 * model.num_layers * capacity)
    kv = memory.kv(0, num_layers=model.num_layers, capacity=capacity)
    state = model.new_states(1).take() if model.has_states else None
    previous: Sequence[int] = ()
    for prompt, wanted in zip(prompts, rows, strict=True):
        shared = _num_shared(previous, prompt.ids)
        # a row whose queries are needed must run, even if its keys are there already
        start = min(shared, *wanted) if wanted else shared
        yield _read(core, prompt, wanted, kv, 0 if model.has_states else start, state)
        previous = prompt.ids


def _read(
    core: Core,
    prompt: Prompt,
    rows: Sequence[int],
    kv: KVSpan,
    start: int,
    state: SequenceState | None,
) -> Evidence:
    model, ids, num_tokens = core.model, prompt.ids, len(prompt.ids)
    windows = list(enumerate(model.sliding_windows))
    layers = [layer for layer, window in windows if window is None]
    if not layers:
        layers = [layer for layer, window in windows if window and window >= num_tokens]
    tap = model.new_query_tap(layers, rows)
    model.key_mover(max(layers), num_tokens)  # one pass tries all layers
    prefill(model, ids, kv=kv, rope_tokens=num_tokens, query_tap=tap, start=start, state=state)
    with torch.inference_mode():
        return Evidence(
            num_tokens=num_tokens,
            layers={
                layer: LayerEvidence(
                    queries=tap.of(layer),
                    keys=kv.read(layer, num_tokens)[0],
                    scale=tap.scales[layer],
                    softcap=tap.softcaps[layer],
                    move_keys=model.key_mover(layer, num_tokens),
                )
                for layer in layers
            },
            rows=tap.rows,
            backend=model.backend,
            protected=prompt.protected,
            breaks=prompt.breaks,
        )


def _num_shared(one: Sequence[int], other: Sequence[int]) -> int:
    """The number of tokens that two prompts have in common at their beginnings."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))
