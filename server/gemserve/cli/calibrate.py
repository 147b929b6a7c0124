"""`gemserve calibrate`: which layer of a model should filter, found by trying them all."""

from __future__ import annotations

import argparse
import importlib.util
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from gemserve.cli.evaluate import Progress, read_lengths
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


def add_command(commands: Any) -> None:
    parser = commands.add_parser("calibrate", help="find the layer that should filter")
    parser.add_argument(
        "--lengths", default="1024,4096", help="of the probes, in tokens (default: %(default)s)"
    )
    parser.add_argument(
        "--samples", default="10", help="probes of each kind and length (default: %(default)s)"
    )
    parser.add_argument("--keep", default="0.0625", help="count or fraction (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--out", type=Path, help="write the figures and pictures there")
    parser.add_argument("--json", action="store_true", help="last line of output is the result")
    add_options(parser, MODEL_OPTIONS, MEMORY_OPTIONS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    from gemserve.calibration import write_calibration
    from gemserve.engine.assemble import assemble
    from gemserve.evaluation.calibrate import calibrate, check_found
    from gemserve.evaluation.example import Draw
    from gemserve.evaluation.needle import SUBTASKS
    from gemserve.model.loader import load
    from gemserve.types import FilterParams

    lengths = read_lengths(arguments.lengths)
    samples = read_value("samples", arguments.samples, number(1))
    keep = read_value("keep", arguments.keep, read_keep)
    if keep == "auto":
        raise ConfigError("keep=auto: layers are compared at one budget; must be a number")
    shortest = min(lengths)
    if FilterParams(method="sieve", keep=keep).kept_count(shortest) >= shortest:
        raise ConfigError(
            f"keep={keep}: must leave out some of {shortest} tokens, the shortest probe"
        )
    if arguments.out is not None:
        make_folder("out", arguments.out)
    model = read_options(arguments, MODEL_OPTIONS, ModelConfig)
    loaded = load(model)
    # the layer does not matter here: every layer is tried
    engine: EngineConfig = read_options(arguments, MEMORY_OPTIONS, EngineConfig)
    core = assemble(loaded, replace(engine, filter_layer=0, filter_method="none"))
    limit = core.config.max_prompt_tokens
    assert limit is not None
    for length in lengths:
        if length > limit:
            raise ConfigError(f"lengths={length}: the longest prompt of this model is {limit}")
    windows = [core.model.window_of(layer) for layer in range(core.model.num_layers)]
    if all(window is not None and window < max(lengths) for window in windows):
        raise ConfigError(f"lengths={max(lengths)}: no layer of this model sees that far back")
    draws = [
        Draw(seed=arguments.seed, num_tokens=length, index=index, samples=samples)
        for length in lengths
        for index in range(samples)
    ]
    progress = Progress(len(SUBTASKS) * len(draws))
    found = calibrate(core, list(SUBTASKS.values()), draws, keep, progress.step)
    progress.close()

    print(f"{'layer':>5} {'score':>6} {'recall':>7} {'distance':>9} {'work':>6}")
    for row in found.layers:
        mark = "  ← filter layer" if row.layer == found.filter_layer else ""
        print(
            f"{row.layer:>5} {row.score:>6.2f} {row.recall:>7.2f} {row.distance:>9.1f}"
            f" {row.work:>6.2f}{mark}"
        )
    print(f"from the whole prompt: score {found.full_score:.2f} on {found.num_probes} probes")
    check_found(found)
    result = {"model": model.model, "seed": arguments.seed, "keep": keep, **asdict(found)}
    written = write_calibration(loaded.source, {"filter_layer": found.filter_layer, **result})
    print(f"wrote {written}")
    if arguments.out is not None:
        out: Path = arguments.out
        (out / "calibration.json").write_text(json.dumps(result, indent=1) + "\n")
        if importlib.util.find_spec("matplotlib") is not None:
            from gemserve.evaluation.report import draw_layers

            draw_layers(out / "calibration.png", found)
    if arguments.json:
        print(json.dumps(result))
    return 0
