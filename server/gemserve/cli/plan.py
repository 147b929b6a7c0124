"""`gemserve plan`: what a prompt costs under each method, from the model's config alone."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from gemserve.calibration.files import Calibration, find_calibration, read_calibration
from gemserve.cli.options import (
    MODEL_OPTIONS,
    READER_OPTIONS,
    WEIGHT_OPTIONS,
    add_options,
    read_bytes,
    read_keep,
    read_options,
    read_segment_size,
    read_value,
)
from gemserve.cli.plan_speed import ReadingSpeed, add_speed_options, speed_of
from gemserve.cli.tables import aligned
from gemserve.config import (
    DEFAULT_KEEP,
    EngineConfig,
    ModelConfig,
    answers_from_few,
    choose_calibration,
    find_offload_layers,
    find_segment_size,
)
from gemserve.contract.filter_options import MAX_QUESTION_TOKENS, Keep
from gemserve.cost import ModelShape, WeightPlan
from gemserve.errors import ConfigError

if TYPE_CHECKING:
    from gemserve.filtering.method_cost import MethodPlan, Reader

_KV_MEMORY = "4GiB"


def add_command(commands: Any) -> None:
    parser = commands.add_parser("plan", help="time and memory per method, from the cost model")
    parser.add_argument("--tokens", default="131072", help="prompt length (default: %(default)s)")
    parser.add_argument(
        "--keep",
        help="tokens to keep, a fraction in (0, 1), or auto, planned with the most (default: "
        f"{DEFAULT_KEEP}, or auto if its calibration says that the model answers best from few)",
    )
    parser.add_argument("--max-tokens", default="256", help="answer length (default: %(default)s)")
    parser.add_argument("--layer", default="auto", help="filter layer (default: %(default)s)")
    parser.add_argument(
        "--window",
        default="auto",
        help="also plan windows of so many tokens, with questions of "
        f"{MAX_QUESTION_TOKENS}; auto: the calibration's; off: none (default: %(default)s)",
    )
    parser.add_argument(
        "--kv-memory",
        help=f"default: {_KV_MEMORY}; with --fleet: what weights leave of the accelerator's memory",
    )
    parser.add_argument("--json", action="store_true", help="end the output with a line of JSON")
    add_options(parser, MODEL_OPTIONS, WEIGHT_OPTIONS, READER_OPTIONS)
    add_speed_options(parser)
    parser.set_defaults(run=run)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedRequest:
    """What `gemserve plan` knows of the model and the prompt. `kv_bytes` None: not given."""

    shape: ModelShape
    num_tokens: int
    keep: int
    max_tokens: int
    layer: int
    segment_size: int | None
    weight_bytes: int
    kv_bytes: int | None


def run(
    arguments: argparse.Namespace,
    plan_load: Callable[[PlannedRequest], dict[str, Any]] | None = None,
) -> int:
    """Print the plan. `plan_load`: plans a load of such prompts instead of one, and prints that."""
    from gemserve.filtering.method_cost import plan_methods
    from gemserve.filtering.methods import METHODS, SERVED_METHODS
    from gemserve.model.families.config_check import find_context_tokens
    from gemserve.model.families.planned_reach import planned_shape
    from gemserve.model.loading.loader import (
        model_from_config,
        norms_from_config,
        resolve_device,
    )
    from gemserve.model.loading.weight_memory import weights_of

    num_tokens = _read_count("tokens", arguments.tokens)
    wanted_keep = None
    if arguments.keep is not None:
        wanted_keep = read_value("keep", arguments.keep, read_keep)
    max_tokens = _read_count("max_tokens", arguments.max_tokens)
    wanted = read_value("window", arguments.window, read_segment_size)
    kv_memory = arguments.kv_memory or _KV_MEMORY
    memory = read_value("kv_memory", kv_memory, read_bytes)
    model = read_options(arguments, MODEL_OPTIONS, ModelConfig)
    engine = read_options(arguments, (*WEIGHT_OPTIONS, *READER_OPTIONS), EngineConfig)
    if plan_load is None and arguments.accelerator is None and model.device == "auto":
        # reading is timed on this machine, so it is the dtype that a server has here that counts
        model = replace(model, device=resolve_device(model.device).type)
    hf, dtype, source = model_from_config(model)
    shape = planned_shape(hf, dtype)
    norms = norms_from_config(model, hf)
    calibration = _find_calibration(arguments.layer, model.model, source, norms, shape)
    layer = calibration.layer
    # as a server does that has calibrated the model
    usual: Keep = "auto" if answers_from_few(calibration) else DEFAULT_KEEP
    keep: Keep = usual if wanted_keep is None else wanted_keep
    kept = calibration.most_kept(keep, num_tokens)
    segment_size = find_segment_size(wanted, calibration)
    offloaded = find_offload_layers(engine.offload_layers, shape.num_layers, layer)
    precision = engine.filter_precision
    weights = weights_of(
        hf, dtype, filter_layer=layer, filter_precision=precision, offload_layers=offloaded
    )
    reader, of_reader = _find_reader(model, engine, calibration, keep, num_tokens)
    context_tokens = find_context_tokens(hf.config)
    _warn_beyond(num_tokens, context_tokens, segment_size)
    dtype_name = str(dtype).removeprefix("torch.")
    rows: list[MethodPlan] = []
    load: dict[str, Any] = {}
    if plan_load is not None:
        if offloaded:
            raise ConfigError(
                f"offload_layers={offloaded}: must be 0 with --fleet, which does not know how fast "
                "weights come from the host"
            )
        if reader is not None:
            raise ConfigError(
                f"reader={engine.reader}: not with --fleet, whose replicas have one model each"
            )
        planned = PlannedRequest(
            shape=shape,
            num_tokens=num_tokens,
            keep=kept,
            max_tokens=max_tokens,
            layer=layer,
            segment_size=segment_size,
            weight_bytes=weights.device,
            kv_bytes=memory if arguments.kv_memory else None,
        )
        load = plan_load(planned)
    else:
        rows = plan_methods(
            shape,
            # SnapKV is not for models with layers that have no keys
            methods=[m for m in SERVED_METHODS if METHODS[m].evictor is None or shape.has_all_keys],
            num_tokens=num_tokens,
            keep=kept,
            max_tokens=max_tokens,
            layer=layer,
            memory_bytes=memory,
            segment_size=segment_size,
            reader=reader,
        )
        whole = next(row for row in rows if row.method == "none")
        speed = speed_of(
            arguments,
            shape,
            device=model.device,
            dtype=dtype,
            flops_per_token=whole.prompt_flops / num_tokens,
        )
        _print_table(rows, speed, shape, num_tokens, kept, layer, kv_memory)
    print(calibration.describe())
    if not calibration.is_measured:
        print(
            "plan reads no weights: a server may find a calibration by them, and names it when it "
            "starts"
        )
    _print_weights(weights, dtype_name)
    if of_reader is not None:
        print(f"weights of the reader: {_mib(of_reader.device)}, beside those")
    if arguments.json:
        settings: dict[str, object] = {
            "model": model.model,
            "tokens": num_tokens,
            "keep": kept,
            "max_tokens": max_tokens,
            "layer": layer,
            "window": segment_size,
            "layers": shape.num_layers,
            "calibration": calibration.source,
            "context_tokens": context_tokens,
            "kv_memory_bytes": memory,
        }
        if plan_load is not None:
            print(json.dumps({**settings, **load, "dtype": dtype_name}))
        else:
            if of_reader is not None:
                settings |= {"reader": engine.reader, "reader_weights": asdict(of_reader)}
            _print_json(settings, dtype_name, weights, rows, speed)
    return 0


def _find_reader(
    model: ModelConfig, engine: EngineConfig, own: Calibration, keep: Keep, num_tokens: int
) -> tuple[Reader | None, WeightPlan | None]:
    """The model that looks, if another one does, and its weights.

    `own`: the calibration of the model that answers. `keep`: of so many tokens.
    """
    from gemserve.filtering.method_cost import Reader
    from gemserve.filtering.reading_plans import paired
    from gemserve.model.families.planned_reach import planned_shape
    from gemserve.model.loading.loader import model_from_config, norms_from_config
    from gemserve.model.loading.weight_memory import weights_of

    if engine.reader is None:
        return None, None
    reading = replace(model, model=engine.reader)
    hf, dtype, source = model_from_config(reading)
    shape = planned_shape(hf, dtype)
    norms = norms_from_config(reading, hf)
    calibration = _find_calibration("auto", engine.reader, source, norms, shape)
    reader = Reader(
        shape=shape,
        layer=calibration.layer,
        segment_size=find_segment_size("auto", calibration) or Calibration.USUAL_SEGMENT,
        memory_bytes=engine.reader_memory_bytes,
        keep=paired(calibration, own).most_kept(keep, num_tokens),
    )
    weights = weights_of(
        hf, dtype, filter_layer=calibration.layer, filter_precision="model", offload_layers=0
    )
    return reader, weights


def _read_count(name: str, text: str) -> int:
    count = read_value(name, text, int)
    if count < 1:
        raise ConfigError(f"{name}={count}: must be at least 1")
    return count


def _print_json(
    settings: dict[str, object],
    dtype: str,
    weights: WeightPlan,
    rows: list[MethodPlan],
    speed: ReadingSpeed,
) -> None:
    result = {
        **settings,
        "dtype": dtype,
        "weights": asdict(weights),
        "reading_flops_per_s": speed.flops,
        "rows": [asdict(row) | {"first_token_s": speed.seconds(row.prompt_flops)} for row in rows],
    }
    print(json.dumps(result))


def _find_calibration(
    layer: str, model: str, source: str, norms: str | None, shape: ModelShape
) -> Calibration:
    """The given layer, a calibration, or a guess."""
    given_layer = None if layer == "auto" else read_value("layer", layer, int)
    path = find_calibration(source, model=model, weights=None, norms=norms)
    calibration = None
    if path is not None:
        calibration = read_calibration(path, num_layers=shape.num_layers, num_heads=shape.num_heads)
    return choose_calibration(
        given_layer,
        calibration,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        sliding_windows=shape.seen,
    )


def _warn_beyond(num_tokens: int, context_tokens: int, segment_size: int | None) -> None:
    if num_tokens < context_tokens:
        return
    allowed = (
        "allows them; they can then be filtered, but not read whole"
        if segment_size is None
        else "allows them or they are read in windows; they cannot be read whole"
    )
    print(
        f"gemserve: warning: tokens={num_tokens:,} does not fit into the model's context of "
        f"{context_tokens:,} tokens: a server refuses such prompts, unless --max-prompt-tokens "
        f"{allowed}",
        file=sys.stderr,
    )


def _print_table(
    rows: list[MethodPlan],
    speed: ReadingSpeed,
    shape: ModelShape,
    tokens: int,
    kept: int,
    layer: int,
    memory: str,
) -> None:
    print(f"{tokens:,} tokens, {kept:,} kept, filter layer {layer} of {shape.num_layers}")
    reading = f"fit in {memory}: reading"
    first = "first token ≥" if speed.is_bound else "first token"
    heads = ("method", "prompt FLOPs", first, "speed-up ≤", "KV filtering", "KV decoding", reading)
    lines = [
        (
            _way_of(row),
            f"{row.prompt_flops:.3e}",
            _seconds(speed.seconds(row.prompt_flops)),
            f"{row.bound:.2f}×",
            _mib(row.filter_kv_bytes),
            _mib(row.decode_kv_bytes),
            str(row.requests_filtering),
            str(row.requests_decoding),
        )
        for row in rows
    ]
    print(*aligned([(*heads, "decoding"), *lines], left=(0,)), sep="\n")
    print(f"times: by {speed.source}")


def _way_of(row: MethodPlan) -> str:
    segments = "" if row.window is None else f", windows of {row.window:,}"
    return f"{row.method}{segments}{', by the reader' if row.has_reader else ''}"


def _seconds(seconds: float) -> str:
    if seconds < 0.1:
        return f"{1000 * seconds:.2f} ms"
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.2f} s"


def _print_weights(weights: WeightPlan, dtype: str) -> None:
    parts = [f"{_mib(weights.resident)} of the model in {dtype}"]
    if weights.fp8:
        parts.append(f"{_mib(weights.fp8)} of FP8 copies for the filter pass")
    if weights.places:
        parts.append(f"{_mib(weights.places)} for layers from the host")
    print(f"weights on the device: {_mib(weights.device)} ({', '.join(parts)})")
    if weights.host:
        print(
            f"weights on the host: {_mib(weights.host)}; each decode step, and each chunk of a "
            "prompt that all layers read, copies them to the device"
        )


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.1f} MiB" if num_bytes else "–"
