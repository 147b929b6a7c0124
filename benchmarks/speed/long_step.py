"""How long a decode step takes behind long sequences, for models with the shapes of real ones.

Weights, keys and values are random and nothing is read, so only time and memory say something.
Large models have fewer layers than the real one. All ways take turns, step by step, and the lower
quartile of steps is reported. `kept`: whether layers with a sliding window have room for that only.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from benchmarks.shared import results
from gemserve.model.cpu.cpu_step import with_cpu_step
from gemserve.model.cpu.packed_linear import can_pack, with_packed_linears
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.kv import DecodeBatch

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
# family, sizes, and the layers of the real model
_SHAPES: dict[str, tuple[str, dict[str, Any], int]] = {
    "gemma3-1b": (
        "gemma3_text",
        {
            "vocab_size": 262144,
            "hidden_size": 1152,
            "intermediate_size": 6912,
            "num_attention_heads": 4,
            "num_key_value_heads": 1,
            "head_dim": 256,
            "sliding_window": 512,
        },
        26,
    ),
    "phi3-mini": (
        "phi3",
        {
            "vocab_size": 32064,
            "hidden_size": 3072,
            "intermediate_size": 8192,
            "num_attention_heads": 32,
            "num_key_value_heads": 32,
        },
        32,
    ),
    "olmoe-1b-7b": (
        "olmoe",
        {
            "vocab_size": 50304,
            "hidden_size": 2048,
            "intermediate_size": 1024,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "num_experts": 64,
            "num_experts_per_tok": 8,
        },
        16,
    ),
    "gpt-oss-20b": (
        "gpt_oss",
        {
            "vocab_size": 201088,
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "sliding_window": 128,
            "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
        },
        24,
    ),
}


def build(shape: str, layers: int | None, tokens: int, dtype: str) -> CausalModel:
    """A random model of that shape, whose linear layers are packed as the server packs them."""
    family, sizes, all_layers = _SHAPES[shape]
    config = AutoConfig.for_model(
        family,
        **sizes,
        num_hidden_layers=layers or all_layers,
        max_position_embeddings=max(tokens + 1, 4096),
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = CausalModel(AutoModelForCausalLM.from_config(config, dtype=_DTYPES[dtype]))
    if can_pack(model.device, model.dtype):
        model = model.variant(with_packed_linears(model.hf))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", choices=_SHAPES, default="gemma3-1b")
    parser.add_argument("--layers", type=int, help="default: those of the real model")
    parser.add_argument("--dtype", choices=_DTYPES, default="bfloat16")
    parser.add_argument("--tokens", type=int, default=32768, help="of each sequence")
    parser.add_argument("--sequences", default="1", help="ascending (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=10)
    results.add_common(parser)
    arguments = parser.parse_args()
    model = build(arguments.shape, arguments.layers, arguments.tokens, arguments.dtype)
    models = {"off": model, "on": with_cpu_step(model, "on")}
    rows = [
        row
        for count in results.numbers(arguments.sequences)
        for row in _measure(models, count, arguments)
    ]
    results.finish("long_step", "cpu", rows, arguments.json)


def _measure(
    models: dict[str, CausalModel], count: int, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    model, room = models["off"], arguments.tokens
    batches = {kept: _batch(model, count, room, kept == "windows") for kept in ("all", "windows")}
    ways = [(way, kept) for way in models for kept in batches]
    taken: dict[tuple[str, str], list[float]] = {way: [] for way in ways}
    for index in range(arguments.steps + 1):  # the first one warms up
        for way, kept in ways:
            started_s = time.perf_counter()
            models[way].decode(list(range(3, 3 + count)), batches[kept], [room] * count)
            if index:
                taken[way, kept].append(time.perf_counter() - started_s)
    return [
        {
            "shape": arguments.shape,
            "layers": model.num_layers,
            "dtype": arguments.dtype,
            "tokens": room,
            "sequences": count,
            "cpu_step": way,
            "kept": kept,
            "ms": statistics.quantiles(times, n=4)[0] * 1e3,
            "kv_mib": batches[kept].memory.num_bytes / 2**20,
        }
        for (way, kept), times in taken.items()
    ]


def _batch(model: CausalModel, count: int, room: int, is_sliding: bool) -> DecodeBatch:
    """Sequences at their last token, of which layers with a window keep that or everything."""
    layout = model.shape.kv_layout()
    kept = layout.room(room) if is_sliding else layout.room_for_all(room)
    units = layout.units(room, kept)
    memory = model.new_memory(units * count)
    memory.rows.normal_()
    spans = [
        memory.kv(index * units, num_layers=model.num_layers, capacity=room, is_sliding=is_sliding)
        for index in range(count)
    ]
    slots = [room - 1] * count
    return DecodeBatch(memory, spans, slots=slots, positions=slots)


if __name__ == "__main__":
    main()
