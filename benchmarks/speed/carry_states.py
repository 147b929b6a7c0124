"""Compares continuing from the kept tokens' states at the filter layer with reading them again.

Both follow the same filter pass, through transformers' own attention. Compared are the time to the
first token and the memory; docs/log/filter-quality.md compares the answers.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import torch
from transformers import DynamicCache

from benchmarks.shared import harness, results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="4096,16384")
    parser.add_argument("--keep", type=int, default=1024)
    results.add_common(parser)
    arguments = parser.parse_args()
    model = harness.twin(harness.random_llama(arguments.device))
    layers, lower = list(model.model.layers), harness.FILTER_LAYER
    config = model.config
    number = next(model.parameters()).element_size()
    # bytes of a token in one layer
    kv_bytes = 2 * config.num_key_value_heads * config.head_dim * number
    rows = []
    for num_tokens in map(int, arguments.lengths.split(",")):
        ids = torch.tensor([harness.random_ids(num_tokens, config.vocab_size, 0)])
        ids = ids.to(model.device)
        kept = torch.arange(0, num_tokens, num_tokens // arguments.keep, device=model.device)
        times: dict[str, list[float]] = {"filter": [], "restart": [], "carry": []}
        for _ in range(arguments.repeats):
            cache = DynamicCache()
            positions = torch.arange(num_tokens, device=model.device)
            states = timed(times["filter"], model, ids, layers[:lower], positions, cache)
            fresh = torch.arange(len(kept), device=model.device)
            timed(times["restart"], model, ids[:, kept], layers, fresh, DynamicCache())
            for held in cache.layers:
                held.keys, held.values = held.keys[:, :, kept], held.values[:, :, kept]
            timed(times["carry"], model, states[:, kept], layers[lower:], kept, cache)
        passes = {name: statistics.median(each) for name, each in times.items()}
        restart_s, carry_s = (passes["filter"] + passes[name] for name in ("restart", "carry"))
        before = num_tokens * (lower * kv_bytes + kv_bytes // 2)  # and the filter layer's keys
        rows.append(
            {
                "tokens": num_tokens,
                "filter_s": passes["filter"],
                "restart_s": passes["restart"],
                "carry_s": passes["carry"],
                "ttft_carry_over_restart": carry_s / restart_s,
                "restart_mib": before / 2**20,
                "carry_mib": (before + num_tokens * config.hidden_size * number) / 2**20,
            }
        )
    results.finish("carry", arguments.device, rows, arguments.json)


@torch.inference_mode()
def timed(
    times: list[float],
    model: Any,
    start: torch.Tensor,
    layers: list[Any],
    positions: torch.Tensor,
    cache: DynamicCache,
) -> torch.Tensor:
    """States after some layers, from ids or from states: [1, tokens, hidden]."""
    results.synchronize(model.device.type)
    began = time.perf_counter()
    hidden = start if start.is_floating_point() else model.model.embed_tokens(start)
    rope = model.model.rotary_emb(hidden, positions[None])
    for layer in layers:
        hidden = layer(
            hidden,
            attention_mask=None,
            position_ids=positions[None],
            past_key_values=cache,
            position_embeddings=rope,
        )
    results.synchronize(model.device.type)
    times.append(time.perf_counter() - began)
    return hidden


if __name__ == "__main__":
    main()
