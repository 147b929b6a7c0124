"""Draws the load test's pictures as PNG bytes, for a light or a dark page."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

from gemserve_client.load_test.metrics import LATENCIES, point_name
from gemserve_client.load_test.result_files import Saved

MAX_CURVES = 8
MAX_SAMPLES = 2000
SHOWN = ("ttft_ms", "tpot_ms", "e2e_ms")
LOG_ABOVE = 30  # ratio of the largest to the smallest value
MIN_SPAN = 0.25  # lowest end of an axis, relative to its upper end
LEGEND_COLUMNS = 6


@dataclass(frozen=True, slots=True)
class Theme:
    name: str
    paper: str
    ink: str
    grid: str
    pair: tuple[str, str]
    error: str
    scale: tuple[float, float]  # the part of the colour map that is visible on the background

    def colors(self, count: int) -> list[Any]:
        """One colour for each curve. Three or more curves get shades in order."""
        if count <= 2:
            return list(self.pair[:count])
        return list(matplotlib.colormaps["viridis"](np.linspace(*self.scale, count)))


LIGHT = Theme("light", "#ffffff", "#1f2328", "#d8dee4", ("#1f6feb", "#d4650a"), "#cf222e", (0, 0.8))
DARK = Theme("dark", "#14181e", "#e6edf3", "#39414b", ("#6cb0ff", "#ffa657"), "#ff7b72", (0.3, 1))

Draw = Callable[[Theme], Figure]


@dataclass(frozen=True, slots=True)
class Curve:
    """A named set of points: one point for a CDF, several for a throughput curve."""

    name: str
    points: Sequence[Saved]


def png(draw: Draw, theme: Theme) -> bytes:
    settings = {
        "figure.facecolor": theme.paper,
        "axes.facecolor": theme.paper,
        "savefig.facecolor": theme.paper,
        "axes.edgecolor": theme.grid,
        "axes.grid": True,
        "axes.labelcolor": theme.ink,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlesize": "medium",
        "figure.titlesize": "medium",
        "font.size": 9.0,
        "grid.color": theme.grid,
        "grid.linewidth": 0.6,
        "legend.frameon": False,
        "text.color": theme.ink,
        "xtick.color": theme.ink,
        "ytick.color": theme.ink,
    }
    with matplotlib.rc_context(settings), io.BytesIO() as file:
        draw(theme).savefig(file, format="png", dpi=130)
        return file.getvalue()


def _figure(height: float) -> Figure:
    return Figure(figsize=(10, height), layout=ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.06))


def some(points: Sequence[Any], most: int = MAX_CURVES) -> list[Any]:
    """At most `most` of the values, spread evenly, with the first and the last."""
    if len(points) <= most:
        return list(points)
    return [points[round(i)] for i in np.linspace(0, len(points) - 1, most)]


def cdfs(panels: Sequence[tuple[str, Sequence[Curve]]]) -> Draw:
    """For each panel row, the share of requests within each value of TTFT, TPOT and E2E."""

    def draw(theme: Theme) -> Figure:
        figure = _figure(0.7 + 2.6 * len(panels))
        grid = figure.subplots(len(panels), len(SHOWN), squeeze=False, sharey=True)
        for axes, (title, curves) in zip(grid, panels, strict=True):
            axes[0].set_ylabel(f"{title}\nrequests within" if title else "requests within")
            for ax, key in zip(axes, SHOWN, strict=True):
                _cdf(ax, key, curves, theme)
        _legend(figure, grid[0][0])
        return figure

    return draw


def _cdf(ax: Axes, key: str, curves: Sequence[Curve], theme: Theme) -> None:
    everything: list[float] = []
    for curve, color in zip(curves, theme.colors(len(curves)), strict=True):
        values = np.sort(_values(curve.points, key))
        everything += values.tolist()
        if len(values) > MAX_SAMPLES:
            values = np.quantile(values, np.linspace(0, 1, MAX_SAMPLES))
        steps = [*values[:1], *values]
        shares = np.linspace(0, 100, len(steps))
        ax.step(steps, shares, where="post", color=color, label=curve.name)
    ax.set_xlabel(f"{LATENCIES[key]} (ms)")
    ax.set_ylim(0, 102)
    ax.set_yticks([0, 25, 50, 75, 95], ["0 %", "25 %", "50 %", "75 %", "95 %"])
    if everything:
        _scale(ax, "x", everything)
    else:
        _nothing(ax)


def throughput(curves: Sequence[Curve]) -> Draw:
    """Latency against throughput at p50 and p95, with one marker for each point."""

    def draw(theme: Theme) -> Figure:
        figure = _figure(4.0)
        left, right = figure.subplots(1, 2)
        pairs = (
            (left, "requests_per_s", "completed requests/s", "ttft_ms"),
            (right, "output_tokens_per_s", "output tokens/s", "tpot_ms"),
        )
        for ax, x_key, x_label, y_key in pairs:
            for curve, color in zip(curves, theme.colors(len(curves)), strict=True):
                is_highest = curve is max(curves, key=lambda c: _mean_p95(c, y_key))
                ink = _Ink(color, theme.paper, is_highest)
                _throughput(ax, curve, (x_key, y_key), ink)
            ax.set_xlabel(x_label)
            ax.set_ylabel(f"{LATENCIES[y_key]} (ms)")
            rows = [point["row"] for curve in curves for point in curve.points]
            values = [row[y_key][part] for row in rows for part in ("p50", "p95")]
            _scale(ax, "y", [value for value in values if value])
            ax.set_xlim(0, 1.08 * max(row[x_key] or 0 for row in rows) or 1)
        _legend(figure, left)
        return figure

    return draw


@dataclass(frozen=True, slots=True)
class _Ink:
    """How a throughput curve is drawn. The highest curve has its names above, others below."""

    color: Any
    paper: str
    is_highest: bool


def _throughput(ax: Axes, curve: Curve, keys: tuple[str, str], ink: _Ink) -> None:
    x_key, y_key = keys
    rows = [point["row"] for point in curve.points]
    rows = [row for row in rows if row[y_key]["p50"] is not None]
    xs = [row[x_key] for row in rows]
    name = f"{curve.name} " if curve.name else ""
    for part, style, marker in (("p50", "-", "o"), ("p95", "--", "s")):
        ys = [row[y_key][part] for row in rows]
        ax.plot(xs, ys, style, marker=marker, markersize=4, color=ink.color, label=name + part)
    part, offset = ("p95", 6) if ink.is_highest else ("p50", -12)
    for row, x in zip(rows, xs, strict=True):
        setting = row["concurrency"] if row["rate"] is None else f"{row['rate']:g}"
        named = ax.annotate(str(setting), (x, row[y_key][part]), xytext=(0, offset), ha="center",
                            textcoords="offset points", color=ink.color, fontsize=8)  # fmt: skip
        named.set_path_effects([withStroke(linewidth=2.5, foreground=ink.paper)])


def _mean_p95(curve: Curve, key: str) -> float:
    return float(np.mean([point["row"][key]["p95"] or 0 for point in curve.points]))


def timeline(points: Sequence[Saved]) -> Draw:
    """How many requests ran at each time, and when requests failed."""

    def draw(theme: Theme) -> Figure:
        figure = _figure(3.2)
        ax = figure.subplots()
        shades = theme.colors(len(points))
        named = {id(point) for point in some(points)} if len(points) > 1 else set()
        failed: list[float] = []
        for number, (point, color) in enumerate(zip(points, shades, strict=True)):
            times_s, running = _running(point)
            label = point_name(point["row"]) if id(point) in named else f"_{number}"
            ax.fill_between(times_s, running, step="post", color=color, alpha=0.3, linewidth=0)
            ax.step(times_s, running, where="post", color=color, linewidth=1, label=label)
            failed += [
                point["began_s"] + request["ended_s"]
                for request in point["requests"]
                if request["error"] not in (None, "cancelled")
            ]
        if failed:
            ax.plot(failed, [0] * len(failed), "x", color=theme.error, markersize=6,
                    label="failed", clip_on=False, linestyle="none", zorder=5)  # fmt: skip
        ax.set_xlabel("time since the start (s)")
        ax.set_ylabel("requests running")
        ax.set_ylim(bottom=0)
        ax.yaxis.set_major_locator(MaxNLocator(nbins=6, integer=True))
        ax.margins(x=0.01)
        _legend(figure, ax)
        return figure

    return draw


def _running(point: Saved) -> tuple[np.ndarray, np.ndarray]:
    """Sample times since the first point's start, and the requests running at each."""
    requests = point["requests"]
    starts = np.sort([request["started_s"] for request in requests])
    ends = np.sort([request["ended_s"] for request in requests])
    times_s = np.linspace(0, ends[-1] if len(ends) else 0, MAX_SAMPLES)
    running = np.searchsorted(starts, times_s, "right") - np.searchsorted(ends, times_s, "right")
    return np.r_[0, times_s] + point["began_s"], np.r_[0, running]


def _values(points: Sequence[Saved], key: str) -> np.ndarray:
    values = [request[key] for point in points for request in point["requests"]
              if request["error"] is None and request[key] is not None]  # fmt: skip
    return np.array(values, dtype=float)


def _scale(ax: Axes, which: str, values: Sequence[float]) -> None:
    """A logarithmic axis where values differ much, with plain numbers on it."""
    positive = [value for value in values if value > 0]
    axis = ax.xaxis if which == "x" else ax.yaxis
    if positive and max(positive) > LOG_ABOVE * min(positive):
        (ax.set_xscale if which == "x" else ax.set_yscale)("log")
        decades = np.log10(max(positive) / min(positive))
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 2.5 else (1,)))
        axis.set_minor_locator(NullLocator())
        if which == "y":
            ax.set_ylim(min(positive) / 1.3, max(positive) * 1.6)
        axis.set_minor_formatter(NullFormatter())
    elif which == "y":
        ax.set_ylim(0, 1.15 * max(positive, default=1))  # room for the names of the markers
    elif positive:
        low, high = ax.get_xlim()
        missing = MIN_SPAN * high - (high - low)  # otherwise tiny differences would look large
        if missing > 0:
            ax.set_xlim(low - missing / 2, high + missing / 2)
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def _legend(figure: Figure, ax: Axes) -> None:
    handles, labels = ax.get_legend_handles_labels()
    named = [pair for pair in zip(handles, labels, strict=True) if pair[1]]
    if len(named) > 1 or any(label == "failed" for _, label in named):
        figure.legend(*zip(*named, strict=True), loc="outside upper center",
                      ncols=min(len(named), LEGEND_COLUMNS))  # fmt: skip


def _nothing(ax: Axes) -> None:
    ax.text(0.5, 0.5, "nothing measured", transform=ax.transAxes, ha="center", va="center")
    ax.set_xticks([])
