"""What a prefix costs as it grows, and what NTK-Attention's term costs in its place.

It measures one layer's attention over a chunk, and the whole model reading a prompt and decoding a
token: with a real prefix of 2^0 to 2^16 positions, with the term, and with neither, in turn. The
figures are medians. The term's cost does not depend on the prefix that it replaces; it is measured
again beside each length.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository root

import torch

from benchmarks.shared import harness, results
from gemserve.adapters.ntk import NTK, shapes
from gemserve.adapters.prefix import Prefix
from gemserve.config import ModelConfig
from gemserve.model.adapter import NO_ADAPTER, Adapter, AttentionOptions
from gemserve.model.loading.loader import load
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.kv import DecodeBatch
from gemserve_kernels import merge


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="default: a random one of 16 layers")
    parser.add_argument("--tokens", type=int, default=256, help="of the prompt (%(default)s)")
    parser.add_argument("--most", type=int, default=16, help="longest prefix is 2^this")
    parser.add_argument("--s", type=int, default=16, help="the term's rank (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write ntk.png there")
    results.add_common(parser)
    arguments = parser.parse_args()
    model = (
        CausalModel(harness.random_llama(arguments.device))
        if arguments.model is None
        else load(ModelConfig(model=arguments.model, device=arguments.device)).model
    )
    term = random_term(model, arguments.s)
    layer, whole = LayerPass(model, arguments.tokens), WholePass(model, arguments.tokens)
    passes: dict[str, Callable[[Adapter], None]] = {
        "layer": layer.run,
        "prefill": whole.prefill,
        "decode": whole.decode,
    }
    lengths = [1 << power for power in range(0, arguments.most + 1, 2)]
    prefixes = {length: random_prefix(model, length) for length in lengths}
    rows: list[dict[str, Any]] = []
    for name, run in passes.items():
        results.note(name)
        contestants: dict[tuple[str, int], Adapter] = {}
        for length, prefix in prefixes.items():
            contestants["nothing", length] = NO_ADAPTER
            contestants["ntk", length] = term
            contestants["prefix", length] = prefix
        taken = timed(run, contestants, arguments.repeats, arguments.device)
        for length in lengths:
            row: dict[str, Any] = {"pass": name, "prefix_tokens": length}
            times = {f"{who}_ms": 1e3 * s for (who, of), s in taken.items() if of == length}
            rows.append(row | times)
    for name in passes:
        of_pass = [row for row in rows if row["pass"] == name]
        times = [row["ntk_ms"] for row in of_pass]
        longer = [r["prefix_tokens"] for r in of_pass if r["prefix_ms"] > r["ntk_ms"]]
        if not arguments.json:
            print(
                f"{name}: the term's time varies by {max(times) / min(times) - 1:.1%}; a prefix "
                f"costs more from {min(longer, default='(never)')} positions on"
            )
    if arguments.out is not None:
        draw(rows, arguments.out / "ntk.png")
    results.finish("ntk", arguments.device, rows, arguments.json)


class LayerPass:
    """One layer's attention over a chunk that stands alone."""

    def __init__(self, model: CausalModel, tokens: int) -> None:
        shape = model.shape
        like: dict[str, Any] = {"device": model.device, "dtype": model.dtype}
        self._backend = model.backend
        self._query = torch.randn(shape.num_heads, tokens, shape.head_dim, **like)
        self._key, self._value = torch.randn(2, shape.num_kv_heads, tokens, shape.head_dim, **like)
        self._options = AttentionOptions(scale=shape.head_dim**-0.5)

    @torch.inference_mode()
    def run(self, adapter: Adapter) -> None:
        scale = self._options.scale
        own = self._backend.part(self._query, self._key, self._value, scale=scale, is_causal=True)
        extra = adapter.part(0, self._query, self._options, self._backend)
        merge([own] if extra is None else [own, extra])


class WholePass:
    """All layers: a prompt, or one token after it."""

    def __init__(self, model: CausalModel, tokens: int) -> None:
        layers, capacity = model.num_layers, tokens + 1
        self._model, self._tokens = model, tokens
        self._ids = harness.random_ids(tokens, model.vocab_size, 0)
        self._memory = model.new_memory(2 * layers * capacity)
        self._kv = self._memory.kv(0, num_layers=layers, capacity=capacity)

    def prefill(self, adapter: Adapter) -> None:
        self._model.prefill_chunk(
            self._ids,
            start=0,
            kv=self._kv,
            rope_tokens=self._tokens,
            is_last=True,
            adapter=adapter,
        )

    @torch.inference_mode()
    def decode(self, adapter: Adapter) -> None:
        place = [self._tokens]
        batch = DecodeBatch(self._memory, [self._kv], slots=place, positions=place)
        self._model.decode([3], batch, [self._tokens], [adapter])


def random_term(model: CausalModel, s: int) -> NTK:
    sizes = shapes(model.shape, model.shape.head_dim, s)
    made = {name: torch.rand(size, device=model.device) for name, size in sizes.items()}
    return NTK("term", "1", **made)


def random_prefix(model: CausalModel, length: int) -> Prefix:
    shape = model.shape
    size = (2, shape.num_layers, shape.num_kv_heads, length, shape.head_dim)
    keys, values = torch.randn(size, device=model.device, dtype=model.dtype)
    return Prefix("prefix", "1", keys=keys, values=values)


def timed(
    run: Callable[[Adapter], None],
    contestants: dict[tuple[str, int], Adapter],
    repeats: int,
    device: str,
) -> dict[tuple[str, int], float]:
    """Median seconds of each, all of them once per round."""
    taken: dict[tuple[str, int], list[float]] = {name: [] for name in contestants}
    for _ in range(repeats):
        for name, adapter in contestants.items():
            run(adapter)  # a long prefix fills the caches before the next contestant runs
            results.synchronize(device)
            start = time.perf_counter()
            run(adapter)
            results.synchronize(device)
            taken[name].append(time.perf_counter() - start)
    return {name: statistics.median(seconds) for name, seconds in taken.items()}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(row["pass"] for row in rows))
    figure, axes = plt.subplots(1, len(names), figsize=(3.6 * len(names), 3))
    for axis, name in zip(axes, names, strict=True):
        of_pass = [row for row in rows if row["pass"] == name]
        for who in ("prefix", "ntk", "nothing"):
            lengths = [row["prefix_tokens"] for row in of_pass]
            axis.plot(lengths, [row[f"{who}_ms"] for row in of_pass], marker=".", label=who)
        axis.set(title=name, xscale="log", yscale="log", xlabel="prefix positions", ylabel="ms")
    axes[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=80)
    plt.close(figure)


if __name__ == "__main__":
    main()
