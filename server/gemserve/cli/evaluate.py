"""`gemserve eval`: how often each method still answers, and what it kept."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemserve.cli.eval_table import table
from gemserve.cli.options import (
    MEMORY_OPTIONS,
    MODEL_OPTIONS,
    add_options,
    make_folder,
    number,
    read_keep,
    read_options,
    read_value,
)
from gemserve.config import EngineConfig, ModelConfig
from gemserve.errors import ConfigError

if TYPE_CHECKING:  # a command that runs no model loads no torch
    from gemserve.engine.core import Core
    from gemserve.evaluation.cases import TooLong

GENERATED_TASKS = ("needle", "ruler", "relevance")
READ_TASKS = ("jsonl", "longbench")
GOLD_TASKS = ("jsonl",)  # those of them whose files can say where an answer is
_LENGTHS = "1024,4096"
_SAMPLES = "20"
_METRICS = {"contains": "contains", "exact": "items"}  # their names in evaluation.metrics


def add_command(commands: Any) -> None:
    parser = commands.add_parser("eval", help="measure filter methods")
    parser.add_argument("task", choices=(*GENERATED_TASKS, *READ_TASKS))
    parser.add_argument(
        "--data",
        type=Path,
        help="jsonl: a file of contexts, questions and answers; longbench: a file or the folder",
    )
    parser.add_argument("--methods", default="none,gemfilter,sieve", help="default: %(default)s")
    parser.add_argument(
        "--subtasks",
        help="default: single for needle, which also has multikey, multivalue, multiquery and, for "
        "real chat models, natural, natural_several, question_first, associative, chain and code; "
        "all for the others",
    )
    parser.add_argument(
        "--metric",
        choices=tuple(_METRICS),
        help="how answers to generated prompts are judged: contains (the default) counts an answer "
        "as right if all that is expected is in it; exact, if it is that and nothing else",
    )
    parser.add_argument("--lengths", help=f"tokens of generated prompts (default: {_LENGTHS})")
    parser.add_argument("--keep", default="512", help="count or fraction (default: %(default)s)")
    parser.add_argument(
        "--samples",
        help=f"examples of each length, or one number for each length (default: {_SAMPLES}); of a "
        "file that many of its first lines (default: all)",
    )
    parser.add_argument(
        "--skip-too-long",
        action="store_true",
        help="leave out prompts of a file that the model has no room for",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--layer", default="auto", help="filter layer (default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, help="folder for outcomes and pictures; a run in it is continued"
    )
    parser.add_argument("--json", action="store_true", help="end the output with a line of JSON")
    add_options(parser, MODEL_OPTIONS, MEMORY_OPTIONS)
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True)
class Batch:
    """Draws that some subtasks share. `settings`: what else an outcome must have had the same.

    Draws from a file have each their own length.
    """

    subtasks: Any
    draws: list[Any]
    settings: dict[str, object] = field(default_factory=dict)


MakeBatches = Callable[["Core"], list[Batch]]


def run(arguments: argparse.Namespace) -> int:
    from tqdm import tqdm

    from gemserve.evaluation.calibrated import build_calibrated_core
    from gemserve.evaluation.cases import pool_lengths
    from gemserve.evaluation.score import Outcomes, average, evaluate
    from gemserve.model.base import hash_tokenizer, hash_weights

    methods = _methods(arguments.methods)
    keep = read_value("keep", arguments.keep, read_keep)
    if keep == "auto":
        raise ConfigError("keep=auto: methods are compared at one budget; see method sieve:auto")
    layer = None if arguments.layer == "auto" else read_value("layer", arguments.layer, int)
    is_read = arguments.task in READ_TASKS
    make_batches = _read_files(arguments, methods) if is_read else _generated(arguments)
    model = read_options(arguments, MODEL_OPTIONS, ModelConfig)
    # evaluation filters every prompt it can, however short
    given: EngineConfig = read_options(arguments, MEMORY_OPTIONS, EngineConfig)
    engine = replace(given, filter_min_tokens=0, filter_layer=layer)
    out: Path | None = arguments.out
    if out is not None:
        make_folder("out", out)
    core = build_calibrated_core(model, engine)
    batches = make_batches(core)
    settings = {
        "task": arguments.task,
        "model": model.model,
        "seed": arguments.seed,
        "layer": core.config.filter_layer,
        "dtype": str(core.model.dtype),
        "weights": hash_weights(core.model.hf),
        "tokenizer": hash_tokenizer(core.tokenizer),
    }
    done = []
    total = sum(len(b.subtasks) * len(b.draws) for b in batches) * len(methods)
    with tqdm(total=total, leave=False, disable=None) as progress:
        for batch in batches:
            outcomes = Outcomes(out / "outcomes.jsonl" if out else None, settings | batch.settings)
            found = evaluate(
                core, batch.subtasks, batch.draws, methods, keep, outcomes, progress.update
            )
            done += pool_lengths(found) if is_read else found

    rows = average(done)
    whole = Counter(
        (o.subtask, o.prompt_tokens, o.method) for o in done if o.reason == "short_prompt"
    )
    print(*table(rows, whole), sep="\n")
    comparisons = _compare(done, methods)
    _print_comparisons(comparisons)
    if {"none", "sieve", "sieve:fallback"} <= set(methods):
        _print_fallback(done)
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


def _generated(arguments: argparse.Namespace) -> MakeBatches:
    """Check the options of a task that makes its examples; the lengths once a model is there."""
    from gemserve.evaluation.example import Draw, with_metric
    from gemserve.evaluation.table import DEFAULT_SUBTASKS, TASKS

    task = arguments.task
    if arguments.data is not None:
        raise ConfigError(f"data={arguments.data}: {task} makes its examples itself")
    if arguments.skip_too_long:
        raise ConfigError(f"skip-too-long: {task} makes its examples itself, see --lengths")
    lengths = read_lengths(arguments.lengths or _LENGTHS)
    samples = _samples(arguments.samples or _SAMPLES, lengths)
    available = TASKS[task]
    names = _subtasks(arguments) or DEFAULT_SUBTASKS.get(task, tuple(available))
    for name in names:
        if name not in available:
            raise ConfigError(f"subtasks={name}: must be among {', '.join(available)}")
    metric = _METRICS[arguments.metric or "contains"]
    makers = {name: with_metric(available[name], metric) for name in names}

    def make_batches(core: Core) -> list[Batch]:
        limit = core.config.max_prompt_tokens
        assert limit is not None
        for length in lengths:
            if length > limit:
                raise ConfigError(f"lengths={length}: the longest prompt of this model is {limit}")
        draws = [
            Draw(seed=arguments.seed, num_tokens=length, index=index, samples=count)
            for length, count in zip(lengths, samples, strict=True)
            for index in range(count)
        ]
        return [Batch(makers, draws, {"metric": metric})]

    return make_batches


def _read_files(arguments: argparse.Namespace, methods: list[str]) -> MakeBatches:
    """Read the files of a task that has its examples from there; their lengths need a model."""
    from gemserve.evaluation.cases import check_gold, check_packages, measure
    from gemserve.evaluation.table import FILE_TASKS

    task = arguments.task
    if arguments.data is None:
        raise ConfigError(f"data: {task} needs --data, the path of its examples")
    if arguments.lengths is not None:
        raise ConfigError(
            f"lengths={arguments.lengths}: the prompts of {task} have the lengths they have"
        )
    if arguments.metric is not None:
        raise ConfigError(f"metric={arguments.metric}: {task} has a metric of its own")
    if "oracle" in methods and task not in GOLD_TASKS:
        raise ConfigError(f"methods=oracle: {task} does not say where in a prompt its answer is")
    given = arguments.samples
    count = None if given is None else read_value("samples", given, number(1))
    files = FILE_TASKS[task](arguments.data, _subtasks(arguments))
    files = [file.first(count) for file in files]
    check_packages(files)
    if "oracle" in methods:
        check_gold(files)

    def make_batches(core: Core) -> list[Batch]:
        batches: list[Batch] = []
        refused: list[TooLong] = []
        for file in files:
            draws, too_long = measure(core, file, arguments.seed)
            refused += too_long
            if draws:
                batches.append(Batch({file.subtask: file.make}, draws, {"data": file.digest}))
        _tell_too_long(refused, sum(len(file.cases) for file in files), arguments.skip_too_long)
        return batches

    return make_batches


def _tell_too_long(refused: list[TooLong], total: int, is_skipping: bool) -> None:
    """Raise `ConfigError` for prompts that do not fit, or say that they are left out."""
    if not refused:
        return
    first = refused[0]
    text = (
        f"{len(refused)} of {total} prompts are too long for this model or its KV memory: "
        f"{first.path}, line {first.line} has {first.tokens} tokens; {first.limit} leave room for "
        f"an answer of {first.max_tokens}"
    )
    if len(refused) == total:
        raise ConfigError(text)
    if not is_skipping:
        raise ConfigError(f"{text}; --skip-too-long runs the others")
    print(f"gemserve: left out: {text}", file=sys.stderr)


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


def _print_fallback(outcomes: Any) -> None:
    from gemserve.evaluation.compare import judge_fallback

    if any(o.score not in (0, 1) for o in outcomes):
        return  # graded answers are not right or wrong
    verdict = judge_fallback(outcomes)
    print(
        f"the fallback fired on {verdict.needed_fired} of {verdict.needed} examples that none gets "
        f"and sieve misses, on {verdict.idle_fired} of {verdict.idle} that sieve gets"
    )


def _methods(text: str) -> list[str]:
    from gemserve.evaluation.arms import ARMS

    methods = list(dict.fromkeys(text.split(",")))
    for method in methods:
        if method not in ARMS:
            raise ConfigError(f"methods={method}: must be among {', '.join(ARMS)}")
    if "bm25" in methods and importlib.util.find_spec("bm25s") is None:
        raise ConfigError("methods=bm25: needs bm25s, as in pip install 'gemserve[eval]'")
    return methods


def _subtasks(arguments: argparse.Namespace) -> list[str] | None:
    given: str | None = arguments.subtasks
    return None if given is None else list(dict.fromkeys(given.split(",")))


def read_lengths(text: str) -> list[int]:
    """Prompt lengths such as "1024,4096". Raises `ConfigError`."""
    lengths = [read_value("lengths", part, int) for part in text.split(",")]
    for length in lengths:
        if length < 128:
            raise ConfigError(f"lengths={length}: must be at least 128")
    if len(set(lengths)) < len(lengths):
        raise ConfigError(f"lengths={text}: one of them stands there twice")
    return lengths


def _samples(text: str, lengths: list[int]) -> list[int]:
    counts = [read_value("samples", part, int) for part in text.split(",")]
    if len(counts) == 1:
        counts *= len(lengths)
    if len(counts) != len(lengths):
        raise ConfigError(f"samples={text}: {len(counts)} numbers for {len(lengths)} lengths")
    for count in counts:
        if count < 1:
            raise ConfigError(f"samples={count}: must be at least 1")
    return counts
