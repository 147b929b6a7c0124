"""How fast is each attention backend alone, and how much of that is left within a filter pass?

`alone` is one layer's causal attention over a whole prompt in one call, with torch's SDPA beside.
`filter pass` is the attention of the layers below the filter layer while the engine filters,
storing and merging included.
"""

from __future__ import annotations

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from benchmarks.gpu_sections.timing import Watch, median_s
from benchmarks.shared import harness, results
from gemserve import config
from gemserve.model.passes.attention import attention
from gemserve.model.passes.causal_model import CausalModel
from gemserve_kernels import select_backend

SDPA = "torch-sdpa"
_TIMED = "gemserve-timed"


class TimedAttention:
    """The engine's attention function, each call of it timed."""

    def __init__(self, device: str) -> None:
        self._device = device
        self.watches: list[Watch] = []

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        watch = Watch(self._device)
        out = attention(*arguments, **options)
        watch.stop()
        self.watches.append(watch)
        return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lengths", default="4096,16384", help="default: %(default)s")
    parser.add_argument("--keep", type=int, default=1024, help="default: %(default)s")
    parser.add_argument("--backends", help="only these, each at every length: flash,cudnn")
    harness.add_shape_option(parser)
    harness.add_prompt_options(parser)
    results.add_row_options(parser)
    arguments = parser.parse_args()
    rows = results.Rows(arguments)
    lengths = results.numbers(arguments.lengths)
    model = harness.random_llama(arguments.device, shape=arguments.shape)
    chosen = CausalModel(model).backend.name  # the engine's own choice comes first
    names = sorted(available(arguments.device, model.dtype, rows), key=lambda name: name != chosen)
    if arguments.backends is not None:
        names = [name for name in names if name in arguments.backends.split(",")]
    for length in lengths:
        for name in (*names, SDPA):
            labels = {"where": "alone", "backend": name, "prompt_tokens": length}
            rows.attempt(labels, partial(alone, arguments, model, name, length))
            results.free(arguments.device)
    if arguments.backends is None:
        wanted = [(chosen, length) for length in lengths]
        wanted += [(name, lengths[0]) for name in names if name != chosen]
    else:
        wanted = [(name, length) for length in lengths for name in names]
    for name, length in wanted:
        labels = {"where": "filter pass", "backend": name, "prompt_tokens": length}
        rows.attempt(labels, partial(in_filter_pass, arguments, model, name, length))
        results.free(arguments.device)
    results.finish("attention", arguments.device, rows, arguments.json)


def available(device: str, dtype: torch.dtype, rows: results.Rows) -> list[str]:
    """Names of the backends that can run here. A row says of each other one why it cannot."""
    names: list[str] = []
    for name in config.ATTENTION_BACKENDS:
        # the plain form holds all scores at once: 64 GiB for one layer at 32,768 tokens
        if name in ("auto", "reference"):
            continue
        try:
            select_backend(torch.device(device), name=name, dtype=dtype)
        except ValueError as error:
            reason = f"skipped: not available: {error}"
            rows.put({"where": "alone", "backend": name}, {"reason": reason})
        else:
            names.append(name)
    return names


@torch.inference_mode()
def alone(arguments: argparse.Namespace, model: Any, name: str, length: int) -> dict[str, Any]:
    shape, like = CausalModel(model).shape, {"device": arguments.device, "dtype": model.dtype}
    query = torch.randn(shape.num_heads, length, shape.head_dim, **like)
    key, value = torch.randn(2, shape.num_kv_heads, length, shape.head_dim, **like)
    scale = shape.head_dim**-0.5
    if name == SDPA:
        q, k, v = (tensor[None] for tensor in (query, key, value))

        def attend() -> object:
            return F.scaled_dot_product_attention(
                q, k, v, is_causal=True, scale=scale, enable_gqa=True
            )
    else:
        backend = select_backend(torch.device(arguments.device), name=name, dtype=model.dtype)

        def attend() -> object:
            return backend.part(query, key, value, scale=scale, is_causal=True)

    taken_s = median_s(attend, arguments.device, repeats=3, warm_up=1)
    return {"time_s": taken_s, "flops_per_s": shape.attention(0, length) / taken_s}


def in_filter_pass(
    arguments: argparse.Namespace, model: Any, name: str, length: int
) -> dict[str, Any]:
    shape, keep = CausalModel(model).shape, arguments.keep
    layer = harness.SHAPES[arguments.shape].filter_layer
    tokens = max(length, arguments.warm_up_tokens)
    chunk = arguments.chunk_tokens
    core = harness.build_core(
        model,
        shape=arguments.shape,
        kv_memory_bytes=harness.request_bytes(shape, "sieve", tokens, 2, keep, layer),
        **({"max_chunk_tokens": int(chunk)} if chunk else {}),
    )
    core.model.backend = select_backend(core.model.device, name=name, dtype=model.dtype)
    warm_up = harness.random_ids(arguments.warm_up_tokens, core.model.vocab_size, 1)
    harness.time_request(core, harness.request(warm_up, "sieve", keep, 2), arguments.device)
    timed = TimedAttention(arguments.device)
    AttentionInterface.register(_TIMED, timed)
    ids = harness.random_ids(length, core.model.vocab_size, 3)
    asked = harness.request(ids, "sieve", keep, 1, selects_only=True)
    with core.model.attention_named(_TIMED):
        total_s = harness.time_request(core, asked, arguments.device)["total_s"]
    taken_s = sum(watch.seconds() for watch in timed.watches)
    return {
        "pass_time_s": total_s,
        "attention_time_s": taken_s,
        "attention_share_of_pass": taken_s / total_s,
        "flops_per_s": layer * shape.attention(0, length) / taken_s,
    }


if __name__ == "__main__":
    main()
