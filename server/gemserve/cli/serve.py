"""`gemserve serve`: load a model and serve it over HTTP."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import socket
import sys
from typing import TYPE_CHECKING, Any

from gemserve.cli.option_tables import ENGINE_OPTIONS, MODEL_OPTIONS, SERVER_OPTIONS
from gemserve.cli.options import add_options, read_options, refuse_unknown_variables
from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve.errors import ConfigError

if TYPE_CHECKING:
    from gemserve.engine.core import Core

log = logging.getLogger("gemserve.loading")


def add_command(commands: Any) -> None:
    parser = commands.add_parser("serve", help="serve a model over OpenAI-style HTTP")
    add_options(parser, MODEL_OPTIONS, SERVER_OPTIONS, ENGINE_OPTIONS)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    # as process 1 of a container, Python would ignore SIGTERM until the server has started
    signal.signal(signal.SIGTERM, _end_at_once)
    model = read_options(arguments, MODEL_OPTIONS, ModelConfig)
    engine = read_options(arguments, ENGINE_OPTIONS, EngineConfig)
    server = read_options(arguments, SERVER_OPTIONS, ServerConfig)
    refuse_unknown_variables()
    from gemserve.api.access.keys import open_keys

    # what can be wrong is found early: importing torch takes seconds, loading a model minutes
    open_keys(server)
    _check_free(server)
    from gemserve.api.app import create_app
    from gemserve.api.serving import build_serving, check_adapters
    from gemserve.cli.http_server import http_server
    from gemserve.evaluation.calibration.calibrated_core import build_calibrated_core

    check_adapters(server)
    log.info("loading %s …", model.model)
    core = build_calibrated_core(model, engine)
    name = server.served_model_name or model.model
    _print_settings(core, name)
    serving = build_serving(core, model_name=name, config=server)
    for adapter in serving.adapters.list():
        print(
            f"gemserve: adapter {adapter.name} ({adapter.kind}, version {adapter.version}), "
            f"{adapter.num_bytes:,} bytes",
            flush=True,
        )

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # what is raised when all has ended
    http_server(create_app(serving), serving.engine, server).run()
    return 0


def _end_at_once(*_: object) -> None:
    """End while nothing is served yet. An exception could be raised anywhere, and be printed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(143)


def _print_settings(core: Core, name: str) -> None:
    """Print what is served, and with which settings."""
    from gemserve.engine.build import planned_weights
    from gemserve.filtering.methods import METHODS

    config, backend = core.config, core.model.backend
    dtype = str(core.model.dtype).removeprefix("torch.")
    print(
        f"gemserve: serving {name} ({core.model.num_layers} layers, {core.model.context_tokens} "
        f"tokens of context) on {core.model.device} in {dtype}, attention by {backend.name}, "
        f"kernels in {backend.kernels}, CUDA graphs {'on' if core.has_graphs else 'off'}; default "
        f"filter {config.filter_method}, layer {config.filter_layer}, keep {config.filter_keep} "
        f"above {config.filter_min_tokens} tokens; KV memory {config.kv_memory_bytes:,} bytes",
        flush=True,
    )
    if METHODS[config.filter_method].selector is not None:
        print(f"gemserve: {core.calibration.describe()}", flush=True)
    weights = planned_weights(core.model, config)
    print(
        f"gemserve: weights {weights.device:,} bytes on {core.model.device} ({weights.fp8:,} of "
        f"FP8 copies for the filter pass), {weights.host:,} bytes on the host",
        flush=True,
    )


def _check_free(server: ServerConfig) -> None:
    family = socket.AF_INET6 if ":" in server.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((server.host, server.port))
        except OSError as error:
            raise ConfigError(
                f"--host={server.host} --port={server.port}: cannot listen there: {error}"
            ) from error
