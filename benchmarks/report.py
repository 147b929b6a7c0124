"""Runs the CPU benchmarks in short forms and writes one HTML page with pictures: `make bench`.

Each benchmark runs in a process of its own, one after the other, about ten minutes in all on two
free cores. One that fails is shown with its error, and the rest goes on. For figures to rely on,
run the benchmarks themselves with more repeats on a quiet machine.
"""

from __future__ import annotations

import argparse
import datetime
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib.ticker
import numpy as np
from matplotlib.figure import Figure

from gemserve_client.load_test import html_report
from gemserve_client.load_test.pictures import Draw, Theme
from gemserve_client.load_test.text_table import cell

HERE = Path(__file__).parent
_MOST_BARS = 5


@dataclass(frozen=True, slots=True)
class Bars:
    """A picture: `value` over `place`, with one bar for each `group` at a place."""

    value: str
    place: str
    group: str | None = None
    unit: str = ""


@dataclass(frozen=True, slots=True)
class Part:
    """One benchmark: its command after `python`, and what its rows are drawn as."""

    title: str
    text: str
    command: Sequence[str]
    bars: Bars


def script(name: str, *options: str) -> list[str]:
    return [str(HERE / f"{name}.py"), *options, "--json"]


PARTS = (
    Part(
        "Time to first token",
        "Less is better. A prompt is read whole (none) or filtered, by a model of random weights.",
        script("ttft", "--lengths", "2048,8192", "--repeats", "2"),
        Bars("ttft_s", "prompt_tokens", "method", "seconds"),
    ),
    Part(
        "Decoding",
        "More is better. Tokens per second of all sequences, without reading prompts.",
        script("decode", "--sequences", "1,8", "--new-tokens", "8", "--skip-continuous-batching"),
        Bars("tokens_per_s", "sequences", "engine", "tokens per second"),
    ),
    Part(
        "Throughput",
        "More is better. Long prompts answered per second, four at a time.",
        script(
            "speed/throughput", "--requests", "8", "--concurrency", "4", "--prompt-tokens", "4096"
        ),
        Bars("requests_per_s", "method", None, "requests per second"),
    ),
    Part(
        "Streams beside a long prompt",
        "Less is better. The longest gaps between a stream's tokens, while a prompt is read.",
        script("speed/interleave", "--prompt-tokens", "8192", "--stream-tokens", "512"),
        Bars("gap_p99_beside_s", "prompt_tokens", None, "seconds"),
    ),
    Part(
        "Further questions about a document",
        "Less is better. Time to first token of the later questions, with the document cache.",
        script("cache", "--model", "random", "--tokens", "8192"),
        Bars("later_s", "summary", None, "seconds"),
    ),
    Part(
        "Needles in prose",
        "More is better. Share of right answers of the built-in model, which shows that the "
        "machinery works; docs/filtering.md has pretrained models.",
        [
            *("-m", "gemserve.cli.main", "eval", "needle", "--methods", "none,gemfilter,sieve"),
            *("--lengths", "1024,4096", "--samples", "10", "--json"),
        ],
        Bars("score", "prompt_tokens", "method", "share of right answers"),
    ),
)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("bench"), help="default: %(default)s")
    parser.add_argument("--only", default="", help="parts whose titles contain this text")
    options = parser.parse_args(arguments)
    wanted = [part for part in PARTS if options.only.lower() in part.title.lower()]
    if not wanted:
        parser.error(f"--only {options.only}: no such part")
    return write(options.out, wanted)


def write(folder: Path, parts: Sequence[Part]) -> int:
    """Run the parts and write `report.html` and `results.json`. Returns how many have failed."""
    folder.mkdir(parents=True, exist_ok=True)
    began = datetime.datetime.now().astimezone()
    done: dict[str, Any] = {}
    sections: list[tuple[str, str]] = []
    num_failed = 0
    for part in parts:
        print(f"{part.title} …", file=sys.stderr, flush=True)
        began_s = time.perf_counter()
        result, error = run(part)
        took_s = time.perf_counter() - began_s
        if result is None:
            num_failed += 1
            sections.append((part.title, f"<pre>{html_report.text(error)}</pre>"))
            continue
        done[part.title] = result
        sections.append((part.title, section(folder, part, result["rows"], took_s)))
    (folder / "results.json").write_text(json.dumps(done, indent=1), encoding="utf-8")
    lead = f"{began:%Y-%m-%d %H:%M}, {machine(done)}"
    html_report.write_page(folder, "gemserve on this machine", lead, sections)
    print(folder / "report.html")
    return num_failed


def run(part: Part) -> tuple[dict[str, Any] | None, str]:
    """The object that a benchmark prints last; or None, and what it said instead."""
    ran = subprocess.run([sys.executable, *part.command], capture_output=True, text=True)
    lines = ran.stdout.strip().splitlines()
    if ran.returncode == 0 and lines:
        try:
            result = json.loads(lines[-1])
        except ValueError:
            return None, f"its last line is no JSON: {lines[-1][:500]}"
        return result, ""
    return None, f"status {ran.returncode}\n{ran.stderr[-3000:]}"


def section(folder: Path, part: Part, rows: Sequence[dict[str, Any]], took_s: float) -> str:
    columns = list(dict.fromkeys(k for row in rows for k, v in row.items() if v is not None))
    lines = [columns, *([cell(row.get(column)) for column in columns] for row in rows)]
    name = part.title.lower().replace(" ", "_")
    try:
        picture = html_report.figure(folder, name, drawing(part.bars, rows), part.text)
    except Exception as error:
        picture = f"<pre>{html_report.text(f'no picture: {type(error).__name__}: {error}')}</pre>"
    command = " ".join(["python", *part.command])
    return (
        f"{picture}\n{html_report.html_table(lines)}\n"
        f'<p class="soft">{took_s:.0f} s: {html_report.text(command)}</p>'
    )


def drawing(bars: Bars, rows: Sequence[dict[str, Any]]) -> Draw:
    """Groups of bars: one group at each place, one bar for each value of `bars.group`.

    Rows without a figure or a place are left out.
    """
    rows = [r for r in rows if isinstance(r.get(bars.value), (int, float)) and bars.place in r]
    places = list(dict.fromkeys(cell(row[bars.place]) for row in rows))
    groups = list(dict.fromkeys(cell(row[bars.group]) if bars.group else "" for row in rows))

    def draw(theme: Theme) -> Figure:
        figure = Figure(figsize=(7, 2.6), layout="constrained")
        axes = figure.subplots()
        width = 0.8 / max(1, len(groups))
        for index, (group, color) in enumerate(zip(groups, theme.colors(len(groups)), strict=True)):
            of_group = [r for r in rows if not bars.group or cell(r[bars.group]) == group]
            at = [places.index(cell(row[bars.place])) for row in of_group]
            offset = (index - (len(groups) - 1) / 2) * width
            drawn = axes.bar(
                np.array(at) + offset,
                [row[bars.value] for row in of_group],
                width * 0.92,
                color=color,
                label=group,
            )
            if len(groups) <= _MOST_BARS:
                axes.bar_label(drawn, fmt=lambda value: f"{value:.3g}", fontsize=8, padding=2)
        axes.set_axisbelow(True)
        axes.set_xticks(range(len(places)), places)
        axes.set_xlabel(bars.place.replace("_", " "))
        axes.set_ylabel(bars.unit)
        axes.yaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5))
        axes.margins(y=0.15)
        if len(groups) > 1:
            axes.legend(fontsize=8)
        return figure

    return draw


def machine(done: dict[str, Any]) -> str:
    """What the benchmarks say about where they ran."""
    first = next((result for result in done.values() if "versions" in result), None)
    if first is None:
        return "nothing has been measured"
    known = [f"{name} {version}" for name, version in first["versions"].items() if version]
    return ", ".join([str(first.get("device")), f"commit {first.get('commit')}", *known])


if __name__ == "__main__":
    sys.exit(main())
