"""Does a filter that reads a prompt in windows take time in proportion to the prompt's length?

For each length and way (`windows`, `one pass`): the time until the filter has chosen, the time to
the first token, and the peak of memory, through the server's defaults. Each measurement runs in a
process of its own, after a short prompt as a warm-up, so that what one leaves behind is not in
another's memory, and one that is killed does not end the others. The prompts are questions about
prose (`benchmarks/shared/long_documents.py`), another document for each repeat.

    python benchmarks/speed/window_lengths.py --out window_lengths
    python benchmarks/speed/window_lengths.py --lengths 4096,16384 --ways windows --window 2048

`flops` is what the cost model says of the operations up to the first token. `line` says of each way
how well seconds = constant + slope · tokens fits: the line has the least sum of squared relative
deviations, and `largest_deviation` is the largest of them. `exponent` is the slope in logarithms:
1 is linear, 2 is quadratic. The folder `--out` gets rows as they are measured (`rows.jsonl`, from
which a stopped run goes on), `window_lengths.json` and `window_lengths.png`.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))  # the repository root

import numpy as np

from benchmarks.shared import long_documents, peak_memory, results
from benchmarks.shared.finished_runs import append_run, find_run, read_runs
from benchmarks.shared.timed_answers import HAS_SEGMENTS, TimedAnswer, answer, filter_options
from gemserve.config import EngineConfig
from gemserve.cost import ModelShape
from gemserve.engine.core import Core
from gemserve.errors import RequestError
from gemserve.filtering.methods import METHODS
from gemserve.llm import LLM

WAYS = ("windows", "one pass")
LENGTHS = "4096,8000,16384,32768,65536,131072,262144,524288,1000000"
_WARM_UP_TOKENS = 2304  # more than a server's `filter_min_tokens`
_QUESTION_TOKENS = 32  # about as many follow each segment


def main() -> None:
    arguments = _parser().parse_args()
    if arguments.measure:
        way, length = arguments.measure.rsplit(",", 1)
        print(json.dumps(measure(arguments, way, int(length))))
        return
    rows: list[dict[str, Any]] = []
    for way in arguments.ways.split(","):
        if way not in WAYS:
            raise SystemExit(f"--ways: {way!r} must be among {', '.join(WAYS)}")
        for length in results.numbers(arguments.lengths):
            rows.append(_row(arguments, way, length))
            if not arguments.json:
                print(rows[-1], flush=True)
    lines = [fit for way in arguments.ways.split(",") for fit in fits(rows, way)]
    if arguments.out is not None:
        result = {"rows": rows, "lines": lines}
        (arguments.out / "window_lengths.json").write_text(json.dumps(result, indent=1) + "\n")
        draw(rows, lines, arguments.out / "window_lengths.png")
    results.finish("window_lengths", "cpu", [*rows, *lines], arguments.json)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="default: %(default)s")
    parser.add_argument("--lengths", default=LENGTHS, help="tokens (default: %(default)s)")
    parser.add_argument("--ways", default=",".join(WAYS), help="default: %(default)s")
    parser.add_argument("--window", default="auto", help="tokens of a window, or auto")
    parser.add_argument("--keep", type=int, help="default: the server's")
    parser.add_argument(
        "--no-fallback", action="store_true", help="keep no more where attention is diffuse"
    )
    parser.add_argument("--max-tokens", type=int, default=4, help="of an answer")
    parser.add_argument(
        "--repeats", type=int, default=3, help="up to 32,768 tokens; one of longer prompts"
    )
    parser.add_argument("--max-prompt-tokens", type=int, help="the server's option")
    parser.add_argument("--limit-s", type=float, default=7200.0, help="of one measurement")
    parser.add_argument("--out", type=Path, help="a folder")
    parser.add_argument("--json", action="store_true", help="only the result line")
    parser.add_argument("--measure", help=argparse.SUPPRESS)  # what the processes are started with
    return parser


def _row(arguments: argparse.Namespace, way: str, length: int) -> dict[str, Any]:
    """The row of one way and length: what is in the folder already, or a new measurement."""
    key = {"way": way, "prompt_tokens": length, "model": arguments.model, "keep": arguments.keep}
    key["no_fallback"] = arguments.no_fallback
    key["asked_window"] = arguments.window if way == "windows" else None
    if arguments.out is not None:
        arguments.out.mkdir(parents=True, exist_ok=True)
        path = arguments.out / "rows.jsonl"
        done = find_run([run for run in read_runs(path) if "reason" not in run], key)
        if done is not None:
            return done
    results.note(f"{way} {length}")
    row = key | _measure_apart(arguments, way, length)
    results.note("")
    if arguments.out is not None:
        append_run(path, row)
    return row


def _measure_apart(arguments: argparse.Namespace, way: str, length: int) -> dict[str, Any]:
    """`measure` in a process of its own. If it fails, the row says why."""
    words = [sys.executable, __file__, *sys.argv[1:], "--measure", f"{way},{length}"]
    try:
        ran = subprocess.run(words, capture_output=True, text=True, timeout=arguments.limit_s)
    except subprocess.TimeoutExpired:
        return {"reason": f"took longer than {arguments.limit_s:.0f} s"}
    if ran.returncode != 0:
        tail = " ".join(ran.stderr.strip().splitlines()[-1:])
        return {"reason": f"the process ended with {ran.returncode}: {tail}"[:400]}
    figures: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return figures


def measure(arguments: argparse.Namespace, way: str, length: int) -> dict[str, Any]:
    """Medians over the repeats, each about a document that no cache knows."""
    if way == "windows" and not HAS_SEGMENTS:
        return {"reason": "this gemserve has no filter.window"}
    settings = EngineConfig(max_prompt_tokens=arguments.max_prompt_tokens)
    llm = LLM(arguments.model, settings)
    segment_size = "off" if way == "one pass" else arguments.window
    segment_size = int(segment_size) if segment_size.isdigit() else segment_size
    repeats = arguments.repeats if length <= 32768 else 1
    try:
        _ask(llm, arguments, segment_size, _WARM_UP_TOKENS, seed=-1)
        before = peak_memory.mark()
        seen = [_ask(llm, arguments, segment_size, length, seed=seed) for seed in range(repeats)]
    except RequestError as error:
        return {"reason": str(error)}
    report = seen[0].report
    tokens = getattr(report, "window", None)
    is_short = report.reason == "short_prompt"
    ttfts = [one.ttft_s for one in seen if one.ttft_s is not None]
    return {
        "real_tokens": report.prompt_tokens,
        "n": len(seen),
        "choose_s": None if is_short else statistics.median(one.choose_s for one in seen),
        "ttft_s": statistics.median(ttfts) if ttfts else None,
        "kept_tokens": report.kept_tokens,
        "window_tokens": tokens,
        "windows": getattr(report, "windows", None),
        "filter_reason": report.reason,
        "rss_before_mib": before >> 20,
        "peak_rss_mib": peak_memory.peak() >> 20,
        "rss_growth_mib": (peak_memory.peak() - before) >> 20,
        "peak_kv_mib": max(one.peak_kv_bytes for one in seen) >> 20,
        "flops": None
        if is_short
        else flops(llm.core, report.prompt_tokens, report.kept_tokens, tokens),
    }


def _ask(
    llm: LLM, arguments: argparse.Namespace, segment_size: int | str, length: int, seed: int
) -> TimedAnswer:
    drawn = long_documents.draw_examples(llm.tokenizer, "natural", length, 1, seed)
    (example,) = drawn
    fallback = False if arguments.no_fallback else None
    options = filter_options(segment_size, keep=arguments.keep, fallback=fallback)
    return answer(llm.core, example.prompt, options, arguments.max_tokens, tenant=f"seed {seed}")


def flops(core: Core, num_tokens: int, kept: int, segment_size: int | None) -> float:
    """FLOPs up to the first token: of one pass, or of segments with the question behind each.

    Both include the pass over the kept tokens. A prompt that was kept whole was filtered in vain.
    """
    shape = core.model.shape
    whole, rest = divmod(num_tokens, segment_size or num_tokens)
    read = whole * _segment_flops(shape, core, segment_size or num_tokens)
    return read + _segment_flops(shape, core, rest) + shape.prefill_chunk(0, kept) + shape.head()


def _segment_flops(shape: ModelShape, core: Core, num_tokens: int) -> float:
    if num_tokens == 0:
        return 0.0
    count = num_tokens + _QUESTION_TOKENS
    selector = METHODS[core.config.filter_method].selector
    scoring = 0.0 if selector is None else selector.score_flops(shape, count)
    return shape.filter_chunk(0, count, core.calibration.layer) + scoring


def fits(rows: list[dict[str, Any]], way: str) -> list[dict[str, Any]]:
    """The lines through a way's figures over its lengths, of prompts that were filtered.

    Where more was kept than asked for, what comes after the choice is left out.
    """
    own = [row for row in rows if row["way"] == way and "reason" not in row]
    own = [row for row in own if row.get("filter_reason") != "short_prompt"]
    found: list[dict[str, Any]] = []
    for name in ("choose_s", "ttft_s", "flops", "rss_growth_mib", "peak_kv_mib"):
        taken = [r for r in own if name == "choose_s" or r.get("filter_reason") is None]
        points = [(r["real_tokens"], r[name]) for r in taken if r.get(name)]
        if len(points) >= 3:
            found.append({"way": way, "line": name, **fit_line(points)})
    return found


def fit_line(points: list[tuple[float, float]]) -> dict[str, float]:
    """The line with the least squared relative deviations, and the slope in logarithms."""
    x, y = (np.array(values, dtype=float) for values in zip(*points, strict=True))
    weighted = np.stack([1 / y, x / y], axis=1)
    (constant, slope), *_ = np.linalg.lstsq(weighted, np.ones(len(x)), rcond=None)
    deviations = np.abs((constant + slope * x) / y - 1)
    exponent = np.polyfit(np.log(x), np.log(y), 1)[0]
    return {
        "slope_per_1k_tokens": float(slope * 1000),
        "constant": float(constant),
        "largest_deviation": float(deviations.max()),
        "at_tokens": float(x[deviations.argmax()]),
        "exponent": float(exponent),
    }


def draw(rows: list[dict[str, Any]], lines: list[dict[str, Any]], path: Path) -> None:
    """Time and memory over the length, both axes logarithmic, with the fitted lines."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    panels = [("choose_s", "seconds until the filter has chosen"), ("ttft_s", "TTFT in seconds")]
    panels += [("rss_growth_mib", "growth of RSS in MiB"), ("peak_kv_mib", "peak KV memory in MiB")]
    panels = [(name, label) for name, label in panels if any(row.get(name) for row in rows)]
    if not panels:
        return
    figure, axes = plt.subplots(1, len(panels), figsize=(4 * len(panels), 3.4), squeeze=False)
    for axis, (name, label) in zip(axes[0], panels, strict=True):
        for way, colour in zip(WAYS, ("tab:blue", "tab:orange"), strict=True):
            own = [r for r in rows if r["way"] == way and r.get(name)]
            x = np.array([r["real_tokens"] for r in own], dtype=float)
            axis.plot(x, [r[name] for r in own], marker="o", color=colour, ls="none", label=way)
            for line in lines:
                if (line["way"], line["line"]) == (way, name):
                    y = line["constant"] + line["slope_per_1k_tokens"] * x / 1000
                    axis.plot(x, y, color=colour, ls="--", lw=1, label=f"{way}: line")
        axis.set(xscale="log", yscale="log", xlabel="prompt tokens", title=label)
        axis.grid(alpha=0.3)
    axes[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=90)
    plt.close(figure)


if __name__ == "__main__":
    main()
