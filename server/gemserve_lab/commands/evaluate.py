"""`gemserve eval`: how often each method still answers, and what it kept."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from collections import Counter
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemserve.cli.options import (
    MEMORY_OPTIONS,
    MODEL_OPTIONS,
    add_options,
    make_folder,
    read_keep,
    read_options,
    read_segment_size,
    read_value,
)
from gemserve.config import DEFAULT_METHOD, EngineConfig, ModelConfig, find_segment_size
from gemserve.ending_signals import EndedBySignal, ending_signals_raised
from gemserve.errors import ConfigError
from gemserve_lab.commands.eval_batches import (
    DEFAULT_LENGTHS,
    DEFAULT_SAMPLES,
    GENERATED_TASKS,
    METRICS,
    READ_TASKS,
    ExampleBatch,
    file_batches,
    generated_batches,
)

if TYPE_CHECKING:  # imported for types only: a command that runs no model loads no torch
    from gemserve.calibration.files import Calibration
    from gemserve.engine.core import Core
    from gemserve_lab.run import Outcome
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from gemserve.cli.tables import aligned

if TYPE_CHECKING:  # imported for types only: a command that runs no model loads no torch
    from gemserve_lab.run import Row

_HEADS = ("subtask", "tokens", "n", "method", "kept", "score", "recall", "whole")
_TEXTS = ("subtask", "method")
_NOTE = "whole: examples read as none reads them, for --keep is not below their prompt's length"


def outcome_table(rows: Sequence[Row], whole: Mapping[tuple[str, int, str], int]) -> list[str]:
    """What `eval` prints: the methods one below the other, under a heading that they share.

    `whole`: by subtask, tokens and method, how many prompts were too short to leave something out.
    Columns without a value are not shown.
    """
    lines: list[tuple[str, ...]] = []
    above: tuple[str, ...] = ()
    for row in rows:
        shared = (row.subtask, str(row.prompt_tokens), str(row.n))
        recall = "" if row.recall is None else f"{row.recall:.2f}"
        count = whole.get((row.subtask, row.prompt_tokens, row.method), 0)
        unfiltered = f"{count}/{row.n}" if count else ""
        of_method = (row.method, f"{row.kept_tokens:.0f}", f"{row.score:.2f}", recall, unfiltered)
        lines.append(("", "", "", *of_method) if shared == above else (*shared, *of_method))
        above = shared
    kept = [i for i in range(len(_HEADS)) if any(line[i] for line in lines)]
    texts = [place for place, i in enumerate(kept) if _HEADS[i] in _TEXTS]
    shown = aligned([[line[i] for i in kept] for line in (_HEADS, *lines)], texts)
    return [*shown, _NOTE] if any(whole.values()) else shown


_EVERY_S = 10.0


@contextmanager
def counted(what: str, unit: str, total: int) -> Iterator[Callable[[], None]]:
    """A function to call after each of `total`, which prints on standard error."""
    from tqdm import tqdm

    done, started_s = 0, time.monotonic()
    last_s = started_s
    with tqdm(desc=what, unit=unit, total=total, leave=False, disable=None) as bar:

        def count() -> None:
            nonlocal done, last_s
            done += 1
            bar.update()
            now_s = time.monotonic()
            if bar.disable and now_s - last_s >= _EVERY_S:
                last_s = now_s
                left_s = (now_s - started_s) / done * (total - done)
                print(
                    f"gemserve: {what}: {done:,} of {total:,} {unit}s, about {left_s:.0f} s left",
                    file=sys.stderr,
                    flush=True,
                )

        if bar.disable:
            print(f"gemserve: {what}: 0 of {total:,} {unit}s", file=sys.stderr, flush=True)
        yield count


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
        "real chat models, natural, natural_several, question_first, near_misses, pairs, "
        "far_definition, associative, chain and code; "
        "all for the others",
    )
    parser.add_argument(
        "--metric",
        choices=tuple(METRICS),
        help="how answers to generated prompts are judged: contains (the default) counts an answer "
        "as right if all that is expected is in it; exact, if it is that and nothing else",
    )
    parser.add_argument(
        "--lengths", help=f"tokens of generated prompts (default: {DEFAULT_LENGTHS})"
    )
    parser.add_argument("--keep", default="512", help="count or fraction (default: %(default)s)")
    parser.add_argument(
        "--samples",
        help="examples of each length, or one number for each length (default: "
        f"{DEFAULT_SAMPLES}); of a file: how many of its first lines (default: all)",
    )
    parser.add_argument(
        "--skip-too-long",
        action="store_true",
        help="leave out prompts of a file that the model has no room for",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--layer", default="auto", help="filter layer (default: %(default)s)")
    parser.add_argument(
        "--window",
        default="auto",
        help="most tokens of a window, for methods that read windows; auto: the calibration's; "
        "off: prompts are read as one sequence (default: %(default)s)",
    )
    parser.add_argument(
        "--out", type=Path, help="folder for outcomes and pictures; a run in it is continued"
    )
    parser.add_argument("--json", action="store_true", help="end the output with a line of JSON")
    add_options(parser, MODEL_OPTIONS, MEMORY_OPTIONS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from gemserve.calibration.search.calibrated_core import build_calibrated_core
    from gemserve_lab.run import average

    methods = _methods(arguments.methods)
    keep = read_value("keep", arguments.keep, read_keep)
    if keep == "auto":
        raise ConfigError(
            f"keep=auto: methods are compared at one budget; see method {DEFAULT_METHOD}:auto"
        )
    layer = None if arguments.layer == "auto" else read_value("layer", arguments.layer, int)
    segment_size = read_value("window", arguments.window, read_segment_size)
    is_read = arguments.task in READ_TASKS
    make = file_batches if is_read else generated_batches
    make_batches = make(arguments, methods)
    model = read_options(arguments, MODEL_OPTIONS, ModelConfig)
    # an evaluation filters every prompt that it can, even short ones
    given: EngineConfig = read_options(arguments, MEMORY_OPTIONS, EngineConfig)
    engine = replace(given, filter_min_tokens=0, filter_layer=layer, filter_window=segment_size)
    out: Path | None = arguments.out
    if out is not None:
        make_folder("out", out)
    core = build_calibrated_core(model, engine)
    done = _run(core, make_batches(core), arguments, model.model, methods, keep)
    outcomes = done.outcomes
    if not outcomes:
        raise KeyboardInterrupt  # before the first answer
    rows = average(outcomes)
    print(*outcome_table(rows, _count_unfiltered(outcomes)), sep="\n")
    _print_end(done, out)
    comparisons = _compare(outcomes, methods)
    _print_comparisons(comparisons)
    for method in methods:
        if {"none", f"{method}:fallback"} <= set(methods):
            _print_fallback(outcomes, method)
    result = {
        "task": arguments.task,
        "model": model.model,
        "seed": arguments.seed,
        "rows": [row.as_json() for row in rows],
    }
    if out is not None:
        from gemserve_lab.report import write_report

        write_report(out, result, outcomes, [asdict(c) for c in comparisons])
    if arguments.json:
        print(json.dumps(result))
    return 0 if done.signal_number is None else 128 + done.signal_number


@dataclass(frozen=True, slots=True)
class _Done:
    """The outcomes of `total` that there are. `signal_number`: of the signal that ended the run."""

    outcomes: list[Outcome]
    total: int
    signal_number: int | None


def _print_end(done: _Done, out: Path | None) -> None:
    """Say which part of the run there is, if a signal has ended it."""
    if done.signal_number is None:
        return
    rest = (
        f"the same command goes on from there, with --out {out}"
        if out is not None
        else "with --out FOLDER the same command goes on where it was ended"
    )
    print(
        f"gemserve: ended early: these are {len(done.outcomes)} of {done.total} answers; {rest}",
        file=sys.stderr,
    )


def _run(
    core: Core,
    batches: list[ExampleBatch],
    arguments: argparse.Namespace,
    model_name: str,
    methods: list[str],
    keep: int | float,
) -> _Done:
    """The outcomes of all batches. Those that --out already holds are not computed again.

    Ctrl-C and SIGTERM end it, with the outcomes that there are by then.
    """
    from gemserve.model.base_model import hash_tokenizer, hash_weights
    from gemserve_lab.run import Outcomes, evaluate, pool_lengths

    settings = {
        "task": arguments.task,
        "model": model_name,
        "seed": arguments.seed,
        "layer": core.config.filter_layer,
        "dtype": str(core.model.dtype),
        "weights": hash_weights(core.model.hf),
        "tokenizer": hash_tokenizer(core.tokenizer),
        "calibration": _choosing(core.calibration),
    }
    segment_size = find_segment_size(core.config.filter_window, core.calibration)
    if segment_size is not None:
        settings["window"] = segment_size
    path = arguments.out / "outcomes.jsonl" if arguments.out else None
    outcomes: list[Outcome] = []
    total = sum(len(b.subtasks) * len(b.draws) for b in batches) * len(methods)
    signal_number = None
    with counted("evaluating", "answer", total) as count, ending_signals_raised():
        for batch in batches:
            stored = Outcomes(path, settings | batch.settings)
            new: list[Outcome] = []
            try:
                for outcome in evaluate(core, batch.subtasks, batch.draws, methods, keep, stored):
                    new.append(outcome)
                    count()
            except EndedBySignal as ended:
                signal_number = ended.number
                del new[len(new) - len(new) % len(methods) :]  # methods are compared in pairs
            outcomes += pool_lengths(new) if arguments.task in READ_TASKS else new
            if signal_number is not None:
                break
    return _Done(outcomes, total, signal_number)


def _choosing(calibration: Calibration) -> dict[str, Any]:
    """What decides, besides layer and window, which tokens are kept; as JSON has it."""
    heads = calibration.heads
    names = ("ends_with", "coverage_bound", "window_bound", "auto_keep", "more_distracts")
    return {
        "heads": None if heads is None else [list(head) for head in heads],
        **{name: getattr(calibration, name) for name in names},
    }


def _count_unfiltered(outcomes: list[Outcome]) -> Counter[tuple[str, int, str]]:
    """How many prompts were too short to be filtered, by subtask, tokens and method."""
    return Counter(
        (o.subtask, o.prompt_tokens, o.method) for o in outcomes if o.reason == "short_prompt"
    )


def _compare(outcomes: Any, methods: list[str]) -> list[Any]:
    """Each method against reading everything, and the default one against every other method."""
    from gemserve_lab.compare import compare

    pairs = [(m, "none") for m in methods if m != "none" and "none" in methods]
    if DEFAULT_METHOD in methods:
        pairs += [(DEFAULT_METHOD, m) for m in methods if m not in ("none", DEFAULT_METHOD)]
    return [compare(outcomes, method, other) for method, other in pairs]


def _print_comparisons(comparisons: list[Any]) -> None:
    for c in comparisons:
        subtask, length = c.worst_cell
        print(
            f"{c.method} − {c.other}: {c.difference:+.3f} (95% {c.low:+.3f} to {c.high:+.3f}, "
            f"n = {c.n}); worst {c.worst:+.2f}, {subtask} at {length}"
        )


def _print_fallback(outcomes: Any, method: str) -> None:
    from gemserve_lab.compare import judge_fallback

    if any(o.score not in (0, 1) for o in outcomes):
        return  # graded answers are neither right nor wrong
    verdict = judge_fallback(outcomes, method)
    print(
        f"the fallback fired on {verdict.needed_fired} of {verdict.needed} examples that none gets "
        f"and {method} misses, on {verdict.idle_fired} of {verdict.idle} that {method} gets"
    )


def _methods(text: str) -> list[str]:
    from gemserve_lab.methods_compared import METHODS_COMPARED

    methods = list(dict.fromkeys(text.split(",")))
    for method in methods:
        if method not in METHODS_COMPARED:
            raise ConfigError(f"methods={method}: must be among {', '.join(METHODS_COMPARED)}")
    if "bm25" in methods and importlib.util.find_spec("bm25s") is None:
        raise ConfigError("methods=bm25: needs bm25s, as in pip install 'gemserve[eval]'")
    return methods
