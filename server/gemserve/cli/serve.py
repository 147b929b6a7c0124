"""`gemserve serve`: load a model and serve it over HTTP."""

from __future__ import annotations

import argparse
import gc
import logging
import os
import signal
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import TYPE_CHECKING, Any

from gemserve.cli.logs import set_up_logs
from gemserve.cli.one_heap import use_one_heap
from gemserve.cli.options import (
    ENGINE_OPTIONS,
    MODEL_OPTIONS,
    SERVER_OPTIONS,
    add_options,
    read_good_options,
    refuse_unknown_variables,
)
from gemserve.config import (
    EngineConfig,
    ModelConfig,
    ServerConfig,
    also_named,
    find_segment_size,
    served_name,
)
from gemserve.engine.new_thread import call_in_new_thread, switch_threads_often
from gemserve.http_server.descriptors import raise_descriptor_limit
from gemserve.http_server.loading_probe import LoadingProbe
from gemserve.http_server.ready_line import ready_line

if TYPE_CHECKING:
    from gemserve.api.telemetry.traces import Traces
    from gemserve.engine.core import Core
    from gemserve.engine.ranks.ranks import Ranks
    from gemserve.engine.worker import IdleWork

log = logging.getLogger("gemserve.loading")


def add_command(commands: Any) -> None:
    parser = commands.add_parser("serve", help="serve a model over OpenAI-style HTTP")
    add_options(parser, MODEL_OPTIONS, SERVER_OPTIONS, ENGINE_OPTIONS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    prepare_process()
    model, engine, server, traces = read_settings(arguments)
    log_config = set_up_logs(server.log_format)
    engine = fitting(model, engine)
    with ExitStack() as at_end:
        _serve(model, engine, server, traces, log_config, at_end)
    return 0


def prepare_process() -> None:
    """What a process that serves does first."""
    # as process 1 of a container, Python would ignore them until the server has started
    for ending in _ending_signals():
        signal.signal(ending, _end_at_once)
    use_one_heap()
    switch_threads_often()
    raise_descriptor_limit()


def _serve(
    model: ModelConfig,
    engine: EngineConfig,
    server: ServerConfig,
    traces: Traces | None,
    log_config: dict[str, Any] | None,
    at_end: ExitStack,
) -> None:
    """Load the model and serve until a signal comes. `at_end`: what ends with the server."""
    with LoadingProbe(server.host, server.port) as probe:
        ranks = None
        if server.tensor_parallel > 1:
            ranks = at_end.enter_context(_ranks(model, server.tensor_parallel))
        core, idle_work = _load(model, engine, probe, ranks)
        name = served_name(model, server)
        say: Callable[[str], None] = log.info if server.log_format == "json" else _print
        _tell_settings(core, name, say)
        if ranks is not None:
            say(
                f"{ranks.num_ranks} ranks share the model's heads; processes of the others: "
                f"{', '.join(map(str, ranks.pids))}. Packed weights, the compiled decode step and "
                "CUDA graphs are off with ranks"
            )
        from gemserve.api.app import create_app
        from gemserve.api.serving import build_serving
        from gemserve.http_server.draining_server import http_server

        serving = build_serving(
            core,
            model_name=name,
            also_named=also_named(model, server),
            config=server,
            idle_work=idle_work,
        )
        for adapter in serving.adapters.list():
            say(
                f"adapter {adapter.name} ({adapter.kind}, version {adapter.version}), "
                f"{adapter.num_bytes:,} bytes"
            )
        if ranks is not None:
            ranks.on_fault = serving.engine.abandon
        app = create_app(serving, traces)
    for ending in _ending_signals():  # they are raised again when all has ended
        signal.signal(ending, _end_now)
    listening = http_server(
        app,
        serving.engine,
        server,
        log_config=log_config,
        access_log=False,  # its lines have no request id: see gemserve.api.access.request_id
    )
    has_keys = server.api_key_file is not None
    listening.on_listening = lambda port: say(
        ready_line(server.host, port, name, has_keys=has_keys)
    )
    # a collection would go over all modules and the model's objects: 0.35 s without a token
    gc.collect()
    gc.freeze()
    listening.run()


@contextmanager
def _ranks(model: ModelConfig, num_ranks: int) -> Iterator[Ranks]:
    """The processes of the other ranks. Raises `ConfigError` if the model cannot be divided."""
    # each rank computes with its share of the cores; torch reads this when it is imported
    share = (os.cpu_count() or 1) // num_ranks
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, share)))
    from gemserve.engine.ranks.ranks import Ranks
    from gemserve.model.loading.loader import check_ranks, with_dtype

    check_ranks(model, num_ranks)
    ranks = Ranks(call_in_new_thread(lambda: with_dtype(model)), num_ranks)
    try:
        yield ranks
    finally:
        ranks.stop()


def read_settings(
    arguments: argparse.Namespace,
    num_engines: int = 1,
    check: Callable[[ModelConfig, EngineConfig, ServerConfig], Iterable[str]] = lambda *_: (),
) -> tuple[ModelConfig, EngineConfig, ServerConfig, Traces | None]:
    """Raises one `ConfigError` for all that is wrong, with the settings or on this machine.

    That is found early: importing torch takes seconds, loading a model minutes. `check` says what
    else is wrong with the settings.
    """
    from gemserve.api.telemetry.traces import open_traces
    from gemserve.cli.startup_checks import Problems, check_settings

    problems = Problems()
    model, wrong_of_model = read_good_options(arguments, MODEL_OPTIONS, ModelConfig)
    engine, wrong_of_engine = read_good_options(arguments, ENGINE_OPTIONS, EngineConfig)
    server, wrong_of_server = read_good_options(arguments, SERVER_OPTIONS, ServerConfig)
    problems.note(*wrong_of_model, *wrong_of_engine, *wrong_of_server)
    with problems.noted():
        refuse_unknown_variables()
    problems.note(*check(model, engine, server))
    check_settings(problems, model, engine, server, num_engines)
    traces = None
    with problems.noted():
        traces = open_traces(server.otel)
    problems.raise_any()
    return model, engine, server, traces


def _load(
    model: ModelConfig, engine: EngineConfig, probe: LoadingProbe, ranks: Ranks | None
) -> tuple[Core, IdleWork | None]:
    """The core, and what its worker does while there are no requests."""

    def calibrates() -> None:
        probe.phase = "calibrating"

    if ranks is not None:
        from gemserve.calibration.search.calibrated_core import build_ranked_core

        log.info("loading %s in %d ranks …", model.model, ranks.num_ranks)
        return call_in_new_thread(lambda: build_ranked_core(engine, ranks, calibrates)), None
    from gemserve.calibration.search.idle_calibration import build_served_core

    log.info("loading %s …", model.model)
    return call_in_new_thread(lambda: build_served_core(model, engine, calibrates))


def fitting(model: ModelConfig, engine: EngineConfig, num_engines: int = 1) -> EngineConfig:
    """The settings with a KV memory that fits, and a line if that is less than the default."""
    from gemserve.cli.startup_checks import address_space, fitting_engine, total_memory

    fitted = fitting_engine(model, engine, num_engines)
    if fitted.kv_memory_bytes != engine.kv_memory_bytes:
        log.warning(
            "kv_memory=%d instead of %d, because there are %d bytes of memory here; --kv-memory "
            "sets it",
            *(fitted.kv_memory_bytes, engine.kv_memory_bytes),
            min(total_memory(), address_space()),
        )
    return fitted


def _ending_signals() -> list[signal.Signals]:
    """The signals that end the server, besides SIGINT. nohup has SIGHUP ignored."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [signal.SIGTERM] if is_ignored else [signal.SIGTERM, signal.SIGHUP]


def _end_at_once(number: int, _: object) -> None:
    """End while nothing is served yet. An exception could be raised anywhere, and be printed."""
    with suppress(OSError):  # the terminal may be gone
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(128 + number)


def _end_now(number: int, _: object) -> None:
    sys.exit(128 + number)


def _print(text: str) -> None:
    print(f"gemserve: {text}", flush=True)


def _tell_settings(core: Core, name: str, say: Callable[[str], None]) -> None:
    """Say what is served, and with which settings."""
    from gemserve.engine.build import planned_weights
    from gemserve.filtering.methods import METHODS

    config, backend, reading = core.config, core.model.backend, core.reads_with
    segment_size = find_segment_size(config.filter_window, reading.calibration)
    reads_segments = segment_size is not None and METHODS[config.filter_method].reads_segments
    segments = f"windows of {segment_size}" if reads_segments else "no windows"
    dtype = str(core.model.dtype).removeprefix("torch.")
    say(
        f"serving {name} ({core.model.num_layers} layers, {core.model.context_tokens} "
        f"tokens of context) on {core.model.device} in {dtype}, attention by {backend.name}, "
        f"kernels in {backend.kernels}, CUDA graphs {'on' if core.has_graphs else 'off'}; default "
        f"filter {config.filter_method}, layer {reading.config.filter_layer}, "
        f"keep {config.filter_keep} above {config.filter_min_tokens} tokens, {segments}; "
        f"KV memory {config.kv_memory_bytes:,} bytes"
    )
    if core.model.has_states:
        each = core.model.states.num_bytes
        say(
            f"recurrent states {each * config.max_running:,} bytes, {each:,} for each of "
            f"{config.max_running} requests at once; no document cache, no adapters"
        )
    if config.reader is not None:
        say(f"{config.reader} reads prompts for it, {reading.model.num_layers} layers")
    if METHODS[config.filter_method].has_layer:
        say(reading.calibration.describe())
    weights = planned_weights(core.model, config)
    say(
        f"weights {weights.device:,} bytes on {core.model.device} ({weights.fp8:,} of "
        f"FP8 copies for the filter pass), {weights.host:,} bytes on the host"
    )
