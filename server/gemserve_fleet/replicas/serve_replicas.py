"""`gemserve serve --replicas N`: the ingress in this process, and replicas in processes of Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gemserve.config import EngineConfig, ModelConfig, ServerConfig, served_name
from gemserve.errors import ConfigError, ModelError
from gemserve.http_server.loading_probe import LoadingProbe
from gemserve.http_server.ready_line import ready_line
from gemserve_fleet.replicas.cluster import deploy, find_failure, local_cluster, prepare_environment

if TYPE_CHECKING:
    from gemserve_fleet.replicas.ray_replicas import RayReplicas

log = logging.getLogger("gemserve.loading")
_POLL_S = 0.2


def serve_replicas(
    num_replicas: int,
    model: ModelConfig,
    engine: EngineConfig,
    server: ServerConfig,
    log_config: dict[str, Any] | None,
) -> int:
    """Serve until a signal ends the process. Raises `ConfigError`, and `ModelError` of a replica.

    The ingress has the server of a single engine (`http_server`) around it, so connections have the
    same limits, and a signal drains in the same steps.
    """
    num_gpus = _num_gpus(model, num_replicas)
    prepare_environment()
    from gemserve.http_server.draining_server import http_server
    from gemserve_fleet.replicas.ingress import create_ingress
    from gemserve_fleet.replicas.ingress_metrics import IngressMetrics
    from gemserve_fleet.replicas.ray_replicas import RayReplicas
    from gemserve_fleet.replicas.replica import ReplicaSettings
    from gemserve_fleet.replicas.replica_calls import ReplicaFailed, ReplicaLost
    from gemserve_fleet.replicas.router_link import ROUTER_LINK

    settings = ReplicaSettings(
        num_threads=_num_threads(num_replicas), model=model, engine=engine, server=server
    )
    with local_cluster(num_replicas, num_gpus):
        with LoadingProbe(server.host, server.port):
            log.info("loading %s in %d replicas …", model.model, num_replicas)
            replicas = RayReplicas(deploy(settings, num_replicas, bool(num_gpus)))
            _wait_until_ready(replicas)
        log.info("the first replica is ready")
        metrics = IngressMetrics(lambda: num_replicas)
        ROUTER_LINK.on_failure = metrics.router_failures.inc
        app = create_ingress(replicas, server, metrics)
        try:
            asyncio.run(app.state.ingress.adapters.learn())
        except (ReplicaLost, ReplicaFailed) as error:
            raise ModelError(f"no replica could load its adapters: {error}") from error
        listening = http_server(
            app, app.state.ingress, server, log_config=log_config, access_log=False
        )
        name, has_keys = served_name(model, server), server.api_key_file is not None
        listening.on_listening = lambda port: log.info(
            "%s", ready_line(server.host, port, name, has_keys=has_keys)
        )
        listening.run()
    return 0


def _wait_until_ready(replicas: RayReplicas) -> None:
    """Return when one replica is ready. Raises `ModelError` if none can be started."""
    while not replicas.names():
        time.sleep(_POLL_S)
        failure = find_failure()
        if failure is not None:
            raise ModelError(f"no replica could be started: {failure}")


def _num_gpus(model: ModelConfig, num_replicas: int) -> int:
    """How many GPUs the replicas share out, one for each; 0: they compute on the CPU."""
    if model.device == "cpu":
        return 0
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        found = len(list(Path("/dev").glob("nvidia[0-9]*")))
    else:
        found = len([name for name in visible.split(",") if name])
    if not found and model.device == "auto":
        return 0
    if found < num_replicas:
        raise ConfigError(
            f"replicas={num_replicas}: each needs a GPU, and this machine has {found}; use fewer, "
            "or device=cpu"
        )
    return found


def _num_threads(num_replicas: int) -> int:
    """The threads that each replica computes with, so that all together have one for each core."""
    given = os.environ.get("OMP_NUM_THREADS", "")
    num_cores = len(os.sched_getaffinity(0))
    return int(given) if given.isdecimal() else max(1, num_cores // num_replicas)
