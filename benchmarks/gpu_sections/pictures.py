"""What was measured, as PNG files; one that cannot be drawn does not take others with it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu_sections.record import describe

Rows = Sequence[Mapping[str, Any]]
_GIB = 1 << 30


def draw_all(rows: Rows, title: str, folder: Path) -> dict[str, str]:
    """The files drawn, each with "drawn" or why it was not."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError as error:
        return {"all": describe(error)}
    outcome: dict[str, str] = {}
    drawers: dict[str, Callable[[Any, Rows], bool]] = {
        "ttft": _ttft,
        "memory": _memory,
        "decode": _decode,
        "kernels": _kernels,
    }
    for name, draw in drawers.items():
        figure, axis = plt.subplots(figsize=(7, 4.2))
        try:
            if draw(axis, [row for row in rows if row["status"] == "measured"]):
                axis.set_title(title, fontsize=8)
                figure.tight_layout()
                figure.savefig(folder / f"{name}.png", dpi=100)
                outcome[f"{name}.png"] = "drawn"
            else:
                outcome[f"{name}.png"] = "nothing measured"
        except Exception as error:
            outcome[f"{name}.png"] = describe(error)
        plt.close(figure)
    return outcome


def _value(row: Mapping[str, Any], name: str) -> float | None:
    value: float | None = row["figures"].get(name, {}).get("value")
    return value


def _lines(rows: Rows, section: str, name: str, x: str, by: Sequence[str]) -> dict[str, Any]:
    """Points of each line, by its labels: [(x, y), …]."""
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        value = _value(row, name)
        if row["section"] == section and value is not None:
            line = " ".join(str(row["labels"][label]) for label in by)
            lines.setdefault(line, []).append((row["labels"][x], value))
    return {line: sorted(points) for line, points in lines.items()}


def _plot(axis: Any, lines: Mapping[str, Any], scale: float = 1.0) -> bool:
    for line, points in lines.items():
        axis.plot([x for x, _ in points], [y * scale for _, y in points], marker=".", label=line)
    if lines:
        axis.legend(fontsize=7)
    return bool(lines)


def _ttft(axis: Any, rows: Rows) -> bool:
    axis.set(xscale="log", yscale="log", xlabel="prompt tokens", ylabel="seconds to first token")
    return _plot(axis, _lines(rows, "ttft", "ttft", "prompt_tokens", ("variant", "method")))


def _memory(axis: Any, rows: Rows) -> bool:
    """Of the device where that is known, else of the pool."""
    by = ("variant", "method")
    lines = _lines(rows, "ttft", "peak_memory", "prompt_tokens", by)
    what = "peak memory of the device, GiB"
    if not lines:
        lines = _lines(rows, "ttft", "peak_kv", "prompt_tokens", by)
        what = "peak of keys and values, GiB"
    axis.set(xscale="log", xlabel="prompt tokens", ylabel=what)
    return _plot(axis, lines, 1 / _GIB)


def _decode(axis: Any, rows: Rows) -> bool:
    axis.set(xscale="log", xlabel="sequences", ylabel="share of copy bandwidth", ylim=(0, 1.1))
    return _plot(axis, _lines(rows, "decode", "share_of_copy", "sequences", ("variant",)))


def _kernels(axis: Any, rows: Rows) -> bool:
    """Of bandwidth or of products, whichever a kernel is nearer to."""
    bars: dict[str, float] = {}
    for row in rows:
        if row["section"] == "rates":
            shares = [_value(row, "share_of_copy") or 0.0, _value(row, "share_of_bf16") or 0.0]
            bars[" ".join(map(str, row["labels"].values()))] = max(shares)
        if row["section"] == "attention":
            value = _value(row, "share_of_bf16")
            bars[" ".join(map(str, row["labels"].values()))] = value or 0.0
    axis.barh(list(bars), list(bars.values()))
    axis.tick_params(axis="y", labelsize=6)
    axis.invert_yaxis()
    axis.set(xlabel="share of the ceiling: copy bandwidth, or bf16 products")
    return bool(bars)
