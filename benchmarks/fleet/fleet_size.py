"""How many H100s does a load need, with and without windows, filter and cache? By simulation.

Shapes of Llama-3.1-8B, one model on each device, half of NVIDIA's published peaks (what
docs/benchmarks.md measured). For each load and way of reading: the smallest fleet that reaches the
time to the first token, with the project's router. Then, for one load, all ways of routing over
the fleet's size.

    python benchmarks/fleet/fleet_size.py --out fleet
    python benchmarks/fleet/fleet_size.py --out fleet --requests 5000 --loads 64k

Nothing is measured here but the simulated fleet: docs/several-machines.md says what it leaves out.
The folder `--out` gets `fleet_size.json` and `fleet_size.png`; the last line of the output is the
same JSON.
It takes about ten minutes; `--requests` trades time for exactness.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

from gemserve.accelerators import DEVICES, MEMORY_SHARE
from gemserve.cost import ModelShape
from gemserve_client.load_test import result_line
from gemserve_client.load_test.text_table import aligned
from gemserve_fleet.replicas.routing import Reading
from gemserve_fleet.simulator.load import Arrival, OfferedLoad, arrivals
from gemserve_fleet.simulator.policies import POLICIES
from gemserve_fleet.simulator.replica import ReplicaMemory
from gemserve_fleet.simulator.request_cost import RequestCost, request_cost
from gemserve_fleet.simulator.simulation import Outcome, simulate
from gemserve_fleet.simulator.sizing import smallest_fleet

LLAMA_8B = ModelShape(
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    hidden_size=4096,
    vocab_size=128_256,
    layer_params=218_103_808,
    qkv_params=25_165_824,
    element_bytes=2,
)
WEIGHT_BYTES = 2 * 8_030_261_248
FILTER_LAYER = 13  # as in GemFilter's paper
SEGMENT, KEEP, MAX_TOKENS = 8_192, 1_024, 256
CACHE_SHARE = 0.5  # as by default
READINGS: tuple[Reading, ...] = ("whole", "one_pass", "windows")
COLOURS = {
    "router": "tab:blue",
    "consistent hash": "tab:orange",
    "least loaded": "tab:green",
    "random": "tab:red",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A load, the tokens of each prompt, and the time within which 95% get their first token."""

    load: OfferedLoad
    num_tokens: int
    ttft_p95_s: float


QUESTIONS = {
    "64k": Question(
        load=OfferedLoad(requests_per_s=1_000_000 / 86_400), num_tokens=65_536, ttft_p95_s=10.0
    ),
    # Of agents' traces, 0.86 to 0.97 has been sent before.
    "64k-repeated": Question(
        load=OfferedLoad(requests_per_s=1_000_000 / 86_400, new_share=0.1),
        num_tokens=65_536,
        ttft_p95_s=10.0,
    ),
    "1m": Question(load=OfferedLoad(requests_per_s=1 / 60), num_tokens=1_000_000, ttft_p95_s=60.0),
}
_ROUTED = "64k-repeated"  # the load of which the picture shows the ways of routing
_SIZES = (0.8, 0.9, 1.0, 1.15, 1.35, 1.6, 2.0)  # of the smallest fleet


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--loads", default=",".join(QUESTIONS), help="default: %(default)s")
    parser.add_argument("--requests", type=int, default=20_000, help="default: %(default)s")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for name in arguments.loads.split(","):
        if name not in QUESTIONS:
            raise SystemExit(f"--loads: {name!r} must be among {', '.join(QUESTIONS)}")
        question = QUESTIONS[name]
        arriving = list(arrivals(question.load, arguments.requests, arguments.seed))
        rows += fleet_rows(name, question, arriving, arguments.seed)
        print(table([row for row in rows if row["load"] == name]), flush=True)
    result = result_line.result("fleet_size", "simulated h100", {}, rows)
    (arguments.out / "fleet_size.json").write_text(json.dumps(result) + "\n")
    draw(rows, arguments.out / "fleet_size.png")
    print(json.dumps(result))


def fleet_rows(
    name: str, question: Question, arriving: Sequence[Arrival], seed: int
) -> list[dict[str, Any]]:
    """The smallest fleet of each way to read, and then the other ways of routing."""
    rows: list[dict[str, Any]] = []
    for reading in READINGS:
        cost = cost_of(question, reading)
        for share in (0.0, CACHE_SHARE):
            memory = memory_of(share)
            labels = {"load": name, "reading": reading, "cache": share > 0}
            start = time.perf_counter()
            outcome = None
            if cost.peak_bytes <= memory.kv_bytes:
                outcome = smallest_fleet(
                    cost, memory, arriving, ttft_p95_s=question.ttft_p95_s, seed=seed
                )
            figures = {
                "alone_s": cost.reading_s(0),
                "cached_s": cost.reading_s(cost.num_pieces),
                "peak_gib": cost.peak_bytes / 2**30,
                "document_gib": cost.num_pieces * cost.piece_bytes / 2**30,
            }
            rows.append({**labels, **figures, **({} if outcome is None else asdict(outcome))})
            print(labels, f"{time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
    if outcome is None:
        return rows
    for num_replicas in sizes(name, outcome):
        for policy in POLICIES:
            one = simulate(
                cost, memory, arriving, num_replicas=num_replicas, policy=policy, seed=seed
            )
            rows.append({**labels, "is_routing": True, **asdict(one)})
    return rows


def sizes(name: str, smallest: Outcome) -> list[int]:
    """Sizes of the fleet at which ways of routing are compared."""
    shares = _SIZES if name == _ROUTED else (1.0,)
    return sorted({max(1, round(share * smallest.num_replicas)) for share in shares})


def cost_of(question: Question, reading: Reading) -> RequestCost:
    return request_cost(
        LLAMA_8B,
        DEVICES["h100"],
        reading,
        num_tokens=question.num_tokens,
        keep=KEEP,
        max_tokens=MAX_TOKENS,
        layer=FILTER_LAYER,
        segment_size=SEGMENT,
        weight_bytes=WEIGHT_BYTES,
    )


def memory_of(cache_share: float) -> ReplicaMemory:
    kv_bytes = int(MEMORY_SHARE * DEVICES["h100"].memory_bytes) - WEIGHT_BYTES
    return ReplicaMemory(kv_bytes=kv_bytes, cache_bytes=int(cache_share * kv_bytes))


def table(rows: Sequence[dict[str, Any]]) -> str:
    heads = ["load", "reading", "cache", "routing", "alone s", "H100s", "hits", "TTFT p50 s"]
    heads += ["p95", "p99", "answer p95 s", "requests/s", "reading", "decoding"]
    names = ["hit_rate", "ttft_p50_s", "ttft_p95_s", "ttft_p99_s", "answer_p95_s"]
    names += ["requests_per_s", "reading_share", "decoding_share"]
    lines = [
        [
            row["load"],
            row["reading"],
            "on" if row["cache"] else "off",
            row.get("policy", "–"),
            f"{row['alone_s']:.3g}" if "alone_s" in row else "",
            str(row.get("num_replicas", "–")),
            *(f"{row[name]:.3g}" if name in row else "–" for name in names),
        ]
        for row in rows
    ]
    return aligned([heads, *lines])


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Left: the smallest fleets. Right: waiting over the size of the fleet, by routing."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6))
    _draw_sizes(axes[0], [row for row in rows if row["load"] == "64k" and "alone_s" in row])
    routed = [row for row in rows if row["load"] == _ROUTED and "is_routing" in row]
    for policy, colour in COLOURS.items():
        own = [row for row in routed if row["policy"] == policy]
        x = [row["num_replicas"] for row in own]
        axes[1].plot(x, [row["ttft_p95_s"] for row in own], "o-", color=colour, label=policy)
    title = "documents sent repeatedly, in windows, cache on"
    axes[1].set(yscale="log", xlabel="H100s", ylabel="TTFT p95 in seconds", title=title)
    axes[1].set_yticks([1, 2, 5, 10, 20, 50], ["1", "2", "5", "10", "20", "50"])
    axes[1].minorticks_off()
    axes[1].grid(alpha=0.3)
    if routed:
        axes[1].legend(fontsize=8)
    figure.suptitle("1,000,000 requests a day of 65,536 tokens (simulated)", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _draw_sizes(axis: Any, rows: Sequence[dict[str, Any]]) -> None:
    for offset, has_cache, colour in ((-0.2, False, "tab:gray"), (0.2, True, "tab:blue")):
        own = [row for row in rows if row["cache"] == has_cache]
        places = [READINGS.index(row["reading"]) + offset for row in own]
        heights = [row.get("num_replicas", 0) for row in own]
        label = f"document cache {'on' if has_cache else 'off'}"
        bars = axis.bar(places, heights, width=0.38, color=colour, label=label)
        axis.bar_label(bars, fontsize=8)
    axis.margins(y=0.1)
    axis.set_xticks(range(len(READINGS)), [name.replace("_", " ") for name in READINGS])
    axis.set(ylabel="H100s for TTFT p95 ≤ 10 s", title="half of the documents are new")
    axis.legend(fontsize=8)


if __name__ == "__main__":
    main()
