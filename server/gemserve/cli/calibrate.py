"""`gemserve calibrate`: find the layer and heads of a model that filter best, on probes."""

from __future__ import annotations

import argparse
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

from gemserve.cli.options import (
    MEMORY_OPTIONS,
    MODEL_OPTIONS,
    add_options,
    make_folder,
    number,
    read_lengths,
    read_options,
    read_value,
)
from gemserve.cli.tables import aligned
from gemserve.config import EngineConfig, ModelConfig
from gemserve.ending_signals import ending_signals_raised


def add_command(commands: Any) -> None:
    parser = commands.add_parser("calibrate", help="find the layer and heads that should filter")
    parser.add_argument(
        "--lengths",
        default="1024,2048",
        help="lengths of the probes in tokens (default: %(default)s)",
    )
    parser.add_argument(
        "--samples",
        default="6",
        help="documents in prose of each length, and as many others (default: %(default)s)",
    )
    parser.add_argument(
        "--confirm",
        default="6",
        help="documents of other wording that confirm the choice, and as many others "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--windows",
        default="1",
        help="long documents that are read in windows of each size, and as many others "
        "(default: %(default)s)",
    )
    parser.add_argument(
        "--answers",
        default="40",
        help="questions answered to find how much `keep: auto` keeps (default: %(default)s)",
    )
    parser.add_argument(
        "--prefer",
        choices=("quality", "speed"),
        default="quality",
        help="the layer that finds what is said in other words, or the cheapest that finds the "
        "question's words (default: %(default)s)",
    )
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument(
        "--out", type=Path, help="a folder that also gets the figures and a picture"
    )
    parser.add_argument("--json", action="store_true", help="end the output with a line of JSON")
    add_options(parser, MODEL_OPTIONS, MEMORY_OPTIONS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from gemserve.calibration.search.calibrated_core import (
        about_model,
        result_of,
        run_calibration,
    )
    from gemserve.calibration.search.choose_layer import Effort
    from gemserve.engine.build import calibration_path
    from gemserve.model.loading.loader import load

    effort = Effort(
        lengths=tuple(read_lengths(arguments.lengths)),
        samples=read_value("samples", arguments.samples, number(1)),
        confirms=read_value("confirm", arguments.confirm, number(0)),
        windows=read_value("windows", arguments.windows, number(0)),
        answers=read_value("answers", arguments.answers, number(0)),
        prefers=arguments.prefer,
        seed=arguments.seed,
    )
    if arguments.out is not None:
        make_folder("out", arguments.out)
    loaded = load(read_options(arguments, MODEL_OPTIONS, ModelConfig))
    earlier = calibration_path(loaded, EngineConfig())
    if earlier is not None:
        print(f"servers use a calibration of this model already: {earlier}", file=sys.stderr)
    engine: EngineConfig = read_options(arguments, MEMORY_OPTIONS, EngineConfig)
    with ending_signals_raised():
        outcome, seconds = run_calibration(loaded, effort, kv_memory_bytes=engine.kv_memory_bytes)
    _print_outcome(outcome)
    result = result_of(about_model(loaded), outcome, effort, seconds)
    try:
        _write(loaded, result, seconds, is_partial=outcome.is_partial)
    finally:  # if that disk is full, what took minutes is not lost
        _export(arguments, result, outcome)
    return 130 if outcome.is_partial else 0


def _export(arguments: argparse.Namespace, result: dict[str, object], outcome: Any) -> None:
    """Print what was found, and write it where the options say."""
    if arguments.out is not None:
        out: Path = arguments.out
        (out / "calibration.json").write_text(json.dumps(result, indent=1) + "\n")
        if importlib.util.find_spec("matplotlib") is not None:
            from gemserve.calibration.search.layer_chart import draw_layers

            draw_layers(out / "calibration.png", outcome)
    if arguments.json:
        print(json.dumps(result))


def _write(loaded: Any, result: dict[str, object], seconds: float, *, is_partial: bool) -> None:
    """Write the file that servers find, and say so. A part replaces no earlier calibration."""
    from gemserve.calibration.files import place_for, write_calibration
    from gemserve.engine.build import calibration_path

    earlier = calibration_path(loaded, EngineConfig())
    if is_partial and earlier is not None:
        print(
            f"interrupted after {seconds:.0f} s: nothing was written, and servers go on with the "
            f"earlier calibration, {earlier}"
        )
        return
    path = place_for(loaded.source, str(result["weights"]))
    write_calibration(path, result)
    used = calibration_path(loaded, EngineConfig())
    if is_partial:
        print(
            f"interrupted after {seconds:.0f} s; wrote {path} from what was read by then; run it "
            "again to have all"
        )
    elif earlier == path:
        print(f"took {seconds:.0f} s; replaced {path}")
    elif earlier is not None and used == path:
        print(f"took {seconds:.0f} s; wrote {path}, which servers now use instead of {earlier}")
    else:
        print(f"took {seconds:.0f} s; wrote {path}")
    if used != path:
        print(f"servers go on with {used}, unless --calibrate {path} is given")


def _print_outcome(outcome: Any) -> None:
    from gemserve.calibration.search.choose_layer import TIMED

    times = tuple(f"{tokens:,}" for tokens in TIMED)
    lines = [("layer", "own head", "words", "meaning", "work", *times, "heads")]
    for row in outcome.layers:
        heads = " ".join(f"{layer}.{head}" for layer, head in row.heads)
        mark = "  ← filter layer" if row.layer == outcome.chosen.layer else ""
        shares = (row.own_recall, row.words, row.meaning, row.work)
        figures = ("" if share is None else f"{share:.2f}" for share in shares)
        seconds = (f"{s:.1f} s" for s in row.seconds)
        lines.append((str(row.layer), *figures, *seconds, f"{heads}{mark}"))
    whole = (f"{s:.1f} s" for s in outcome.whole_s)
    lines.append(("whole", "", "", "", "1.00", *whole, ""))
    print(*aligned(lines, left=(7,)), sep="\n")
    chosen, trust = outcome.chosen, outcome.trust
    rows = "the question's tokens" + (" and the prompt's end" if chosen.ends_with else "")
    print(f"rows that look: {rows}")
    print(f"questions: {outcome.num_probes}; found of each kind: {_by_kind(outcome.recalls)}")
    if outcome.confirmed:
        print(f"found of each kind in other wording: {_by_kind(outcome.confirmed)}")
    for place, row in enumerate(outcome.segments):
        size = "one pass" if row.window is None else f"windows of {row.window:,} tokens"
        mark = "  ← chosen" if place == 0 else ""
        print(f"{size}: recall {row.recall:.2f}, work {row.work:.3f}{mark}")
    for place, result in enumerate(outcome.keeps):
        mark = "  ← chosen for keep: auto" if place == 0 else ""
        print(f"{result.keep:,} tokens kept: answers {result.score:.2f}{mark}")
    if outcome.whole_score is not None:
        print(f"whole prompts: answers {outcome.whole_score:.2f}")
    print(f"coverage below {trust.bound:.2f} is not trusted: {_errs(trust)}")
    print(f"with windows, below {trust.window_bound:.2f}: {_errs(trust, 'window_')}")
    if outcome.is_partial:
        print("not measured, because of the interrupt: " + ", ".join(_missing(outcome)))


def _by_kind(recalls: dict[str, float]) -> str:
    return ", ".join(f"{kind} {recall:.2f}" for kind, recall in recalls.items())


def _errs(trust: Any, prefix: str = "") -> str:
    """How often a bound distrusts which choices, in words."""
    names = {
        "found": "what was found",
        "missed": "what was missed",
        "absent": "questions without an answer",
        "diffuse": "questions about all of the text",
    }
    shares = ((getattr(trust, prefix + name), what) for name, what in names.items())
    errs = [f"{share:.0%} of {what}" for share, what in shares if share is not None]
    return ", ".join(errs) or "how often that errs was not measured"


def _missing(outcome: Any) -> list[str]:
    """What a whole calibration measures, and this one has not."""
    parts: tuple[tuple[Any, str], ...] = (
        (outcome.confirmed, "probes of other wording"),
        (outcome.segments, "windows"),
        (outcome.keeps, "how much keep: auto keeps"),
    )
    return [name for value, name in parts if not value] or ["some of the probes"]
