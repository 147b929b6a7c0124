"""`gemserve eval`: how often each method still answers, and what it kept."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gemserve.cli.options import MODEL_OPTIONS, add_options, read_keep, read_options
from gemserve.config import EngineConfig, ModelConfig
from gemserve.errors import ConfigError

TASK_NAMES = ("needle", "ruler", "relevance")


def add_command(commands: Any) -> None:
    parser = commands.add_parser("eval", help="measure filter methods")
    parser.add_argument("task", choices=TASK_NAMES)
    parser.add_argument("--methods", default="none,gemfilter,sieve", help="default: %(default)s")
    parser.add_argument("--subtasks", help="default: single for needle, all for the others")
    parser.add_argument("--lengths", default="1024,4096", help="in tokens (default: %(default)s)")
    parser.add_argument("--keep", default="512", help="count or fraction (default: %(default)s)")
    parser.add_argument(
        "--samples", default="20", help="per length, or one number for each (default: %(default)s)"
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--layer", default="auto", help="filter layer (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, help="write outcomes, tables and pictures there; resumes what is there"
    )
    parser.add_argument("--json", action="store_true", help="last line of output is the result")
    add_options(parser, MODEL_OPTIONS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from gemserve.engine.assemble import build_core
    from gemserve.evaluation.example import Draw
    from gemserve.evaluation.score import Outcomes, average, evaluate
    from gemserve.evaluation.table import DEFAULT_SUBTASKS, TASKS

    methods = _methods(arguments.methods)
    lengths = _lengths(arguments.lengths)
    samples = _samples(arguments.samples, lengths)
    keep = _read("keep", arguments.keep, read_keep)
    layer = None if arguments.layer == "auto" else _read("layer", arguments.layer, int)
    available = TASKS[arguments.task]
    names = DEFAULT_SUBTASKS.get(arguments.task, tuple(available))
    if arguments.subtasks is not None:
        names = tuple(arguments.subtasks.split(","))
    for name in names:
        if name not in available:
            raise ConfigError(f"subtasks={name}: must be among {', '.join(available)}")
    model = read_options(arguments, MODEL_OPTIONS, ModelConfig)
    # evaluation filters every prompt it can, however short
    engine = replace(EngineConfig(), filter_min_tokens=0, filter_layer=layer)
    core = build_core(model, engine)
    limit = core.config.max_prompt_tokens
    assert limit is not None
    for length in lengths:
        if length > limit:
            raise ConfigError(f"lengths={length}: the longest prompt of this model is {limit}")

    out: Path | None = arguments.out
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
    settings = {
        "task": arguments.task,
        "model": model.model,
        "seed": arguments.seed,
        "layer": core.config.filter_layer,
    }
    outcomes = Outcomes(out / "outcomes.jsonl" if out else None, settings)
    draws = [
        Draw(seed=arguments.seed, num_tokens=length, index=index, samples=count)
        for length, count in zip(lengths, samples, strict=True)
        for index in range(count)
    ]
    subtasks = {name: available[name] for name in names}
    progress = Progress(len(subtasks) * len(draws) * len(methods))
    done = evaluate(core, subtasks, draws, methods, keep, outcomes, progress.step)
    progress.close()

    rows = average(done)
    _print_rows(rows)
    comparisons = _compare(done, methods)
    _print_comparisons(comparisons)
    result = {
        "task": arguments.task,
        "model": model.model,
        "seed": arguments.seed,
        "rows": [row.as_json() for row in rows],
    }
    if out is not None:
        from gemserve.evaluation.report import write_report

        write_report(out, result, done, [asdict(c) for c in comparisons])
    if arguments.json:
        print(json.dumps(result))
    return 0


class Progress:
    """A counter on a terminal; silent in a pipe."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._is_shown = sys.stderr.isatty()

    def step(self) -> None:
        self._done += 1
        if self._is_shown:
            print(f"\r{self._done}/{self._total}", end="", file=sys.stderr, flush=True)

    def close(self) -> None:
        if self._is_shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)


def _print_rows(rows: Any) -> None:
    width = max(len("subtask"), *(len(row.subtask) for row in rows))
    print(
        f"{'subtask':<{width}} {'tokens':>7} {'method':<10} {'kept':>7} {'score':>6} {'recall':>7}"
        f" {'n':>4}"
    )
    for row in rows:
        recall = "–" if row.recall is None else f"{row.recall:.2f}"
        print(
            f"{row.subtask:<{width}} {row.prompt_tokens:>7} {row.method:<10} "
            f"{row.kept_tokens:>7.0f} {row.score:>6.2f} {recall:>7} {row.n:>4}"
        )


def _compare(outcomes: Any, methods: list[str]) -> list[Any]:
    """Each method against reading everything, and sieve against every other."""
    from gemserve.evaluation.compare import compare

    pairs = [(m, "none") for m in methods if m != "none" and "none" in methods]
    if "sieve" in methods:
        pairs += [("sieve", m) for m in methods if m not in ("none", "sieve")]
    return [compare(outcomes, method, other) for method, other in pairs]


def _print_comparisons(comparisons: list[Any]) -> None:
    for c in comparisons:
        subtask, length = c.worst_cell
        print(
            f"{c.method} − {c.other}: {c.difference:+.3f} (95% {c.low:+.3f} to {c.high:+.3f}, "
            f"n = {c.n}); worst {c.worst:+.2f}, {subtask} at {length}"
        )


def _methods(text: str) -> list[str]:
    from gemserve.evaluation.arms import ARMS

    methods = text.split(",")
    for method in methods:
        if method not in ARMS:
            raise ConfigError(f"methods={method}: must be among {', '.join(ARMS)}")
    if "bm25" in methods and importlib.util.find_spec("bm25s") is None:
        raise ConfigError("methods=bm25: needs bm25s, as in pip install 'gemserve[eval]'")
    return methods


def _lengths(text: str) -> list[int]:
    lengths = [_read("lengths", part, int) for part in text.split(",")]
    for length in lengths:
        if length < 128:
            raise ConfigError(f"lengths={length}: must be at least 128")
    return lengths


def _samples(text: str, lengths: list[int]) -> list[int]:
    counts = [_read("samples", part, int) for part in text.split(",")]
    if len(counts) == 1:
        counts *= len(lengths)
    if len(counts) != len(lengths):
        raise ConfigError(f"samples={text}: {len(counts)} numbers for {len(lengths)} lengths")
    for count in counts:
        if count < 1:
            raise ConfigError(f"samples={count}: must be at least 1")
    return counts


def _read(name: str, text: str, reader: Any) -> Any:
    try:
        return reader(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text}: {error}") from error
