"""Two load tests side by side: values, ratios, and one report with both in each picture."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gemserve_client.load_test import result_line
from gemserve_client.load_test.metrics import METRICS, Row, point_name
from gemserve_client.load_test.options import Comparison
from gemserve_client.load_test.result_files import Saved, UnreadableResult, read_json
from gemserve_client.load_test.text_table import aligned, cell

Pair = tuple[Saved, Saved]


def compare(options: Comparison, command: str) -> dict[str, Any]:
    """Print the table, write the report, and return the result. Raises `UnreadableResult`."""
    paths = (options.before, options.after)
    results = [read_json(path) for path in paths]
    names = _names(paths, results)
    pairs, alone = match(results[0]["points"], results[1]["points"])
    if not pairs:
        has = (" and ".join(point_name(p["row"]) for p in r["points"]) for r in results)
        raise UnreadableResult("no point in common: " + " against ".join(has))
    notes = [f"{name}: only in one" for name in alone] + _differences(results)
    lines = [line for pair in pairs for line in ([""] * 4, *_lines(pair, names))][1:]
    if not options.json_only:
        print(aligned(lines), *notes, sep="\n")
    if options.out is not None:
        options.out.mkdir(parents=True, exist_ok=True)
        _write(options.out, pairs, results, names, notes, command)
    rows = [_ratios(pair) for pair in pairs]
    return result_line.result("load_compare", None, {}, rows)


def match(before: Sequence[Saved], after: Sequence[Saved]) -> tuple[list[Pair], list[str]]:
    """Points of the same rate or concurrency in both results, and the names of all other points."""
    theirs = {_key(point["row"]): point for point in after}
    ours = {_key(point["row"]): point for point in before}
    pairs = [(point, theirs[key]) for key, point in ours.items() if key in theirs]
    alone = [p["row"] for k, p in (ours | theirs).items() if (k in ours) != (k in theirs)]
    return pairs, [point_name(row) for row in alone]


def _key(row: Row) -> tuple[Any, Any]:
    return row["rate"], row["concurrency"]


def _names(paths: Sequence[Path], results: Sequence[Mapping[str, Any]]) -> tuple[str, str]:
    """The two labels if they differ, else the file names if these differ, else A and B."""
    labels = [result.get("label") for result in results]
    files = [path.name if path.is_dir() else path.stem for path in paths]
    for first, second in (labels, files):
        if first and second and first != second:
            return str(first), str(second)
    return "A", "B"


def _differences(results: Sequence[Mapping[str, Any]]) -> list[str]:
    """Settings that differ, other than those that a comparison is meant to vary."""
    first, second = (result["settings"] for result in results)
    about = {"url", "model", "rates", "concurrencies"}
    return [
        f"note: {key} differs: {cell(first.get(key))} and {cell(second.get(key))}"
        for key in dict.fromkeys([*first, *second])
        if key not in about and first.get(key) != second.get(key)
    ]


def _lines(pair: Pair, names: tuple[str, str]) -> list[list[str]]:
    rows = [point["row"] for point in pair]
    lines = [[point_name(rows[0]), *names, f"{names[1]} / {names[0]}"]]
    for metric in METRICS:
        first, second = (metric.of(row) for row in rows)
        if (first is None and second is None) or (metric.hides_zero and not (first or second)):
            continue
        ratio = None if metric.is_higher_better is None else _ratio(first, second)
        mark = "" if ratio is None else f"{ratio:.3f} {_verdict(ratio, metric.is_higher_better)}"
        lines.append([metric.label, cell(first), cell(second), mark])
    return lines


def _ratio(first: float | None, second: float | None) -> float | None:
    return None if first is None or second is None or first <= 0 else second / first


def _verdict(ratio: float, is_higher_better: bool | None) -> str:
    """Say which of two values is better. A difference within 2% counts as noise."""
    if abs(ratio - 1) <= 0.02:
        return " same"
    return "better" if (ratio > 1) == is_higher_better else " worse"


def _ratios(pair: Pair) -> Row:
    """B / A of every rate and latency of one point."""
    first, second = (point["row"] for point in pair)
    ratios: Row = {"concurrency": first["concurrency"], "rate": first["rate"]}
    for metric in METRICS:
        if metric.is_higher_better is None:
            continue
        value = _ratio(metric.of(first), metric.of(second))
        place = ratios.setdefault(metric.keys[0], {}) if len(metric.keys) > 1 else ratios
        place[metric.keys[-1]] = value
    return ratios


def _write(
    folder: Path,
    pairs: Sequence[Pair],
    results: Sequence[Mapping[str, Any]],
    names: tuple[str, str],
    notes: Sequence[str],
    command: str,
) -> None:
    from gemserve_client.load_test import html_report
    from gemserve_client.load_test.pictures import Curve, cdfs, some, throughput

    panels = [
        (point_name(pair[0]["row"]), [Curve(n, [p]) for n, p in zip(names, pair, strict=True)])
        for pair in some(pairs)
    ]
    caption = html_report.CDF_CAPTION
    sections = [("Latency", html_report.figure(folder, "latency_cdf", cdfs(panels), caption))]
    if len(pairs) > 1:
        curves = [Curve(name, [pair[i] for pair in pairs]) for i, name in enumerate(names)]
        caption = "Each marker is one point, named by its concurrency or rate."
        draw = throughput(curves)
        sections.append(
            ("Throughput", html_report.figure(folder, "throughput_latency", draw, caption))
        )
    for pair in pairs:
        heading = point_name(pair[0]["row"])
        sections.append((heading, html_report.html_table(_lines(pair, names))))
    noted = "".join(f"<p>{html_report.text(note)}</p>" for note in notes)
    sections.append(("Command", f"{noted}<pre>{html_report.text(command)}</pre>"))
    lead = ", ".join(
        f"{name}: {result['settings']['model']} at {result['settings']['url']}"
        for name, result in zip(names, results, strict=True)
    )
    html_report.write_page(
        folder, f"Load tests compared: {names[0]} and {names[1]}", lead, sections
    )
