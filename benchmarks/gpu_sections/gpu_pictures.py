"""The pictures of `gpu.py`, drawn from the rows of its report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu_sections.gpu_report import Row, find, title

_GIB = 1 << 30


def draw_all(report: Mapping[str, Any], folder: Path) -> dict[str, str]:
    """Draw each picture. Return for each file "drawn", or why it was not."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot as plt
    except ImportError as error:
        return {"all": str(error)}
    rows = [row for row in report["rows"] if row["status"] == "measured"]
    has_memory = find(rows, "ttft", "peak_memory") is not None
    memory = ("peak_memory", "peak memory of the device")
    if not has_memory:
        memory = ("peak_kv", "peak of keys and values")
    by_method = ("prompt_tokens", ("variant", "method"))
    lines: dict[str, tuple[str, str, str, tuple[str, ...], float]] = {
        "ttft": ("ttft", "ttft", *by_method, 1.0),
        "memory": ("ttft", memory[0], *by_method, 1 / _GIB),
        "decode": ("decode", "share_of_copy", "sequences", ("variant",), 1.0),
    }
    axes: dict[str, dict[str, Any]] = {
        "ttft": {"yscale": "log", "ylabel": "seconds to first token"},
        "memory": {"ylabel": f"{memory[1]}, GiB"},
        "decode": {"ylabel": "share of copy bandwidth", "ylim": (0, 1.1)},
        "kernels": {},
    }
    outcome: dict[str, str] = {}
    for name, options in axes.items():
        drawing, axis = plt.subplots(figsize=(7, 4.2))
        try:
            if name == "kernels":
                is_drawn = _draw_bars(axis, rows)
            else:
                axis.set(xscale="log", xlabel=lines[name][2].replace("_", " "), **options)
                is_drawn = _draw_lines(axis, rows, *lines[name])
            axis.set_title(title(report), fontsize=8)
            drawing.tight_layout()
            if is_drawn:
                drawing.savefig(folder / f"{name}.png", dpi=100)
            outcome[f"{name}.png"] = "drawn" if is_drawn else "nothing measured"
        except Exception as error:  # one picture must not take the others with it
            outcome[f"{name}.png"] = f"{type(error).__name__}: {error}"
        plt.close(drawing)
    return outcome


def _draw_lines(
    axis: Any,
    rows: Sequence[Row],
    section: str,
    name: str,
    x: str,
    by: tuple[str, ...],
    scale: float,
) -> bool:
    lines: dict[str, list[tuple[float, float]]] = {}
    for row in (row for row in rows if row["section"] == section):
        value = row["figures"].get(name, {}).get("value")
        if value is not None:
            line = " ".join(str(row["labels"][label]) for label in by)
            lines.setdefault(line, []).append((row["labels"][x], value * scale))
    for line, points in lines.items():
        axis.plot(*zip(*sorted(points), strict=True), marker=".", label=line)
    if lines:
        axis.legend(fontsize=7)
    return bool(lines)


def _draw_bars(axis: Any, rows: Sequence[Row]) -> bool:
    """Each kernel's share of bandwidth or of products, whichever is larger."""
    bars: dict[str, float] = {}
    for row in (row for row in rows if row["section"] in ("rates", "attention")):
        shares = (row["figures"].get(f"share_of_{name}", {}) for name in ("copy", "bf16"))
        label = " ".join(map(str, row["labels"].values()))
        bars[label] = max(share.get("value") or 0.0 for share in shares)
    axis.barh(list(bars), list(bars.values()))
    axis.tick_params(axis="y", labelsize=6)
    axis.invert_yaxis()
    axis.set(xlabel="share of the ceiling: copy bandwidth, or bf16 products")
    return bool(bars)
