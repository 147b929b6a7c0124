"""Judges a soak: what is left behind, how memory went, and the report as text."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.robustness.mixed_client import Outcome
from gemserve_client.load_test import result_line

MOST_GROWTH = 0.02  # of memory, over the whole soak after its first quarter
LEFT_BEHIND = ("descriptors", "threads", "tasks", "running", "waiting", "kv_usage", "processes")


def finish(report: dict[str, Any], settings: dict[str, Any]) -> dict[str, Any]:
    """Add the verdicts, the settings and the commit to a soak's figures."""
    report["left_behind"] = left_behind(report["before"], report["after"])
    report["memory"] = memory_trend(report["samples"])
    verdicts = report["soak"]["verdicts"]
    report["not_right"] = {name: n for name, n in verdicts.items() if name != "right"}
    report["passed"] = not (
        report["not_right"]
        or report["left_behind"]
        or report["log_errors"]
        or not report["memory"]["is_flat"]
    )
    shown = {name: None if value is None else str(value) for name, value in settings.items()}
    return {"benchmark": "soak", "commit": result_line.commit(), "settings": shown, **report}


def left_behind(before: dict[str, Any], after: dict[str, Any]) -> dict[str, list[float]]:
    """What an idle server has more of than it had before: [before, after] by name."""
    return {name: [before[name], after[name]] for name in LEFT_BEHIND if after[name] > before[name]}


def memory_trend(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """A line through the resident memory of the samples after the first quarter.

    `growth` is the line's rise over that time, as a share of its mean. `range` is the highest less
    the lowest sample, as such a share.
    """
    late = samples[len(samples) // 4 :]
    if len(late) < 2:
        return {"is_flat": True, "samples": len(late)}
    times = [sample["at_s"] for sample in late]
    sizes = [float(sample["rss_bytes"]) for sample in late]
    slope, _ = statistics.linear_regression(times, sizes)
    mean = statistics.fmean(sizes)
    growth = slope * (times[-1] - times[0]) / mean
    return {
        "samples": len(late),
        "mean_bytes": round(mean),
        "lowest_bytes": round(min(sizes)),
        "highest_bytes": round(max(sizes)),
        "bytes_per_hour": round(slope * 3600),
        "share_per_hour": slope * 3600 / mean,
        "growth": growth,
        "range": (max(sizes) - min(sizes)) / mean,
        "is_flat": growth <= MOST_GROWTH,
    }


def latencies(outcomes: Sequence[Outcome]) -> dict[str, float | None]:
    """Median and 99th percentile of the right answers' times, in seconds."""
    good = [outcome for outcome in outcomes if outcome.verdict == "right"]
    firsts = [outcome.ttft_s for outcome in good if outcome.ttft_s is not None]
    gaps = [gap for outcome in good for gap in outcome.gaps_s]
    totals = [outcome.total_s for outcome in good]
    named = {"ttft": firsts, "gap": gaps, "total": totals}
    return {
        f"{name}_p{percent}_s": percentile(values, percent)
        for name, values in named.items()
        for percent in (50, 99)
    }


def percentile(values: Sequence[float], percent: float) -> float | None:
    """The smallest value that so many percent of the values do not exceed."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def as_markdown(report: dict[str, Any]) -> str:
    """The report for people."""
    soak, memory = report["soak"], report["memory"]
    capacity = report["capacity"]
    measured = f"{capacity['requests_per_s']:.2f} requests a second" if capacity else "not measured"
    lines = [
        f"# Soak: {'passed' if report['passed'] else 'NOT passed'}",
        "",
        f"Commit {report['commit']}, {soak['seconds'] / 60:.1f} minutes, {soak['requests']} "
        f"requests at {report['rate']:.2f} a second. Capacity: {measured}. The server's process "
        f"used {soak['cpu_share']:.0%} of a core.",
        "",
        f"Answers: {_listed(soak['verdicts'])}. {len(report['recorded']['unsteady'])} of the "
        f"calls had no steady answer and were left out. Pauses of this process: "
        f"{soak['pauses_s'] or 'none'}. Held back: {soak['held_back']}.",
        "",
        f"Latencies: {_listed(soak['latency'])}.",
        "",
        f"Memory after the first quarter: {_memory(memory)}.",
        "",
        f"Left behind when idle: {report['left_behind'] or 'nothing'}. "
        f"Errors in the log: {len(report['log_errors'])}.",
        "",
        "| kind | right | other |",
        "|---|---|---|",
    ]
    for kind, counts in soak["kinds"].items():
        other = {name: count for name, count in counts.items() if name != "right"}
        lines.append(f"| {kind} | {counts.get('right', 0)} | {_listed(other) or '–'} |")
    names = ("rss_bytes", "descriptors", "threads", "tasks", "kv_usage", "cache_usage", "processes")
    lines += ["", "| idle server | before | after |", "|---|---|---|"]
    lines += [f"| {name} | {report['before'][name]} | {report['after'][name]} |" for name in names]
    for bad in [*soak["bad"][:10], *report["warm_up"]["bad"][:5]]:
        lines.append(
            f"\n- {bad['name']} at {bad['due_s']:.1f} s: {bad['verdict']}: {bad['detail']}"
        )
    return "\n".join(lines) + "\n"


def _memory(memory: dict[str, Any]) -> str:
    if "mean_bytes" not in memory:
        return "too few samples"
    mean, low, high = (memory[f"{name}_bytes"] / 2**20 for name in ("mean", "lowest", "highest"))
    return (
        f"{mean:.1f} MiB on average, {low:.1f} to {high:.1f}; a line through "
        f"{memory['samples']} samples rises by {memory['growth']:+.2%} over them, "
        f"{memory['share_per_hour']:+.2%} an hour"
    )


def _listed(figures: dict[str, Any]) -> str:
    shown = (
        f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
        for name, value in figures.items()
    )
    return ", ".join(shown)
