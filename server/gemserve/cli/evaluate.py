"""`gemserve eval needle`: how often each method still answers, and what it kept."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from gemserve.cli.options import MODEL_OPTIONS, add_options, read_keep, read_options
from gemserve.config import EngineConfig, ModelConfig
from gemserve.errors import ConfigError
from gemserve.types import FILTER_METHODS


def add_command(commands: Any) -> None:
    parser = commands.add_parser("eval", help="measure filter methods")
    parser.add_argument("task", choices=("needle",))
    parser.add_argument("--methods", default="none,gemfilter,sieve", help="default: %(default)s")
    parser.add_argument("--lengths", default="1024,4096", help="in tokens (default: %(default)s)")
    parser.add_argument("--keep", default="512", help="count or fraction (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=20, help="per length (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--layer", default="auto", help="filter layer (default: %(default)s)")
    parser.add_argument("--out", type=Path, help="write needle.json there")
    parser.add_argument("--json", action="store_true", help="last line of output is the result")
    add_options(parser, MODEL_OPTIONS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from gemserve.engine.assemble import build_core
    from gemserve.evaluation.needle import needle_examples
    from gemserve.evaluation.score import Row, evaluate

    methods = _methods(arguments.methods)
    lengths = _lengths(arguments.lengths)
    keep = _read("keep", arguments.keep, read_keep)
    layer = None if arguments.layer == "auto" else _read("layer", arguments.layer, int)
    if arguments.samples < 1:
        raise ConfigError(f"samples={arguments.samples}: must be at least 1")
    model = read_options(arguments, MODEL_OPTIONS, ModelConfig)
    # evaluation filters every prompt it can, however short
    engine = replace(EngineConfig(), filter_min_tokens=0, filter_layer=layer)
    core = build_core(model, engine)
    limit = core.config.max_prompt_tokens
    assert limit is not None
    for length in lengths:
        if length > limit:
            raise ConfigError(f"lengths={length}: the longest prompt of this model is {limit}")

    progress = Progress(len(lengths) * len(methods) * arguments.samples)
    rows: list[Row] = []
    for length in lengths:
        examples = needle_examples(core.tokenizer, length, arguments.samples, arguments.seed)
        rows += evaluate(core, examples, methods, keep, progress.step)
    progress.close()

    print(f"{'method':<10} {'tokens':>7} {'kept':>7} {'score':>6} {'recall':>7} {'n':>4}")
    for row in rows:
        print(
            f"{row.method:<10} {row.prompt_tokens:>7} {row.kept_tokens:>7.0f} {row.score:>6.2f} "
            f"{row.recall:>7.2f} {row.n:>4}"
        )
    result = {
        "task": arguments.task,
        "model": model.model,
        "seed": arguments.seed,
        "rows": [row.as_json() for row in rows],
    }
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "needle.json").write_text(json.dumps(result, indent=1) + "\n")
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


def _methods(text: str) -> list[Any]:
    methods = text.split(",")
    for method in methods:
        if method not in FILTER_METHODS:
            raise ConfigError(f"methods={method}: must be among {', '.join(FILTER_METHODS)}")
    return methods


def _lengths(text: str) -> list[int]:
    lengths = [_read("lengths", part, int) for part in text.split(",")]
    for length in lengths:
        if length < 128:
            raise ConfigError(f"lengths={length}: must be at least 128")
    return lengths


def _read(name: str, text: str, reader: Any) -> Any:
    try:
        return reader(text)
    except ValueError as error:
        raise ConfigError(f"{name}={text}: {error}") from error
