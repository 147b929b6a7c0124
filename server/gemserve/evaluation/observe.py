"""One reading of a prompt that shows what a filter at any layer would see."""

from __future__ import annotations

import torch

from gemserve.engine.core import Core
from gemserve.engine.prompt import Prompt
from gemserve.filtering.selector import Evidence

_CHUNK = 512


def observe(core: Core, prompt: Prompt, window: int) -> dict[int, Evidence]:
    """Evidence by layer, with the last `window` queries; layers that cannot see the start are out.

    The whole prompt goes through all layers: as much work as answering it unfiltered.
    """
    model, ids, num_tokens = core.model, prompt.ids, len(prompt.ids)
    memory = model.new_memory(2 * model.num_layers * num_tokens)
    kv = memory.kv(0, num_layers=model.num_layers, capacity=num_tokens)
    tap = model.new_window(min(window, num_tokens), num_tokens)
    for start in range(0, num_tokens, _CHUNK):
        chunk = ids[start : start + _CHUNK]
        model.prefill_chunk(
            chunk,
            start=start,
            kv=kv,
            rope_tokens=num_tokens,
            is_last=start + len(chunk) == num_tokens,
            window=tap,
        )
    with torch.inference_mode():
        return {
            layer: Evidence(
                queries=tap.queries[layer],
                keys=kv.read(layer, num_tokens)[0],
                scale=tap.scales[layer],
                softcap=tap.softcaps[layer],
                backend=model.backend,
                protected=prompt.protected,
                code_blocks=prompt.code_blocks,
            )
            for layer in range(model.num_layers)
            if (model.window_of(layer) or num_tokens) >= num_tokens
        }
