"""`gemserve serve --replicas N`: several engines behind one address."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from functools import partial

from gemserve.cli import serve
from gemserve.cli.logs import set_up_logs
from gemserve.cli.options import number, read_value
from gemserve.config import EngineConfig, ModelConfig, ServerConfig
from gemserve.errors import ConfigError
from gemserve_fleet.replicas.cluster import check_ray_is_installed

MOST_REPLICAS = 64


def extend(parser: argparse.ArgumentParser) -> None:
    """Add `--replicas` to `gemserve serve`."""
    parser.add_argument(
        "--replicas",
        default="1",
        metavar="REPLICAS",
        help="engines behind one address, each with the model in a process of its own; more than "
        "1 need the packages of gemserve[ray] (default: 1; GEMSERVE_REPLICAS)",
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    num_replicas = read_value("--replicas", arguments.replicas, number(1, MOST_REPLICAS))
    if num_replicas == 1:
        return serve.run(arguments)
    serve.prepare_process()
    check = partial(problems_with_replicas, num_replicas)
    model, engine, server, traces = serve.read_settings(arguments, num_replicas, check)
    log_config = set_up_logs(server.log_format)
    engine = serve.fitting(model, engine, num_replicas)
    from gemserve_fleet.replicas.serve_replicas import serve_replicas

    if traces is not None:  # each replica opens its own
        traces.shut_down()
    return serve_replicas(num_replicas, model, engine, server, log_config)


def problems_with_replicas(
    num_replicas: int, model: ModelConfig, engine: EngineConfig, server: ServerConfig
) -> Iterator[str]:
    """Settings that make no sense with several replicas, and what is not installed."""
    if engine.cache_dir is not None:
        yield (
            f"cache_dir={engine.cache_dir}: only one engine can use a folder; leave it out with "
            f"replicas={num_replicas}"
        )
    if model.device.startswith("cuda:"):
        yield (
            f"device={model.device}: names one GPU, and each of {num_replicas} replicas needs its "
            "own; use cuda, and CUDA_VISIBLE_DEVICES to choose"
        )
    if engine.reader_device.startswith("cuda:"):
        yield (
            f"reader_device={engine.reader_device}: names one GPU, and each of {num_replicas} "
            "replicas has a reader on its own; use cuda"
        )
    if server.tensor_parallel > 1:
        yield (
            f"tensor_parallel={server.tensor_parallel}: a replica is one process; leave it out "
            f"with replicas={num_replicas}"
        )
    if server.library_dir is not None:
        yield (
            f"library_dir={server.library_dir}: libraries are those of one engine; leave it out "
            f"with replicas={num_replicas}"
        )
    if engine.calibrate == "later":
        yield f"calibrate=later: one engine has it; use auto with replicas={num_replicas}"
    if not server.port:
        yield "port=0: must be a port from 1 to 65535 with replicas"
    try:
        check_ray_is_installed()
    except ConfigError as error:
        yield from error.problems
