"""Starts replicas with Ray Serve on this machine, and stops them.

All that Ray leaves open is set here. Ray takes some settings from the environment only, and reads
them when it is imported. So `prepare_environment` comes before the first import of ray.
"""

from __future__ import annotations

import logging
import os
import re
import secrets
import shutil
import signal
import sys
import tempfile
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from gemserve.errors import ConfigError
from gemserve_fleet.replicas.descendants import adopt_orphans, end_processes, find_descendants

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

    from gemserve_fleet.replicas.replica import ReplicaSettings

APPLICATION = "gemserve"
# As many as connections allow. A replica's engine has a queue with limits of its own.
MAX_ONGOING_REQUESTS = 4096
MAX_QUEUED_REQUESTS = 256  # that wait for a replica while all of them have so many
HEALTH_CHECK_PERIOD_S = 2.0
HEALTH_CHECK_TIMEOUT_S = 5.0  # three in a row end a replica
_STOP_TIMEOUT_S = 10.0  # for a replica to stop, after the ingress has drained
# Bodies and parts of replies that pass between processes and are too large for a message.
OBJECT_STORE_BYTES = 512 << 20
_MOST_FAILURE_CHARS = 4000
_END_TIMEOUT_S = 3.0  # in which Ray's processes end by themselves
_ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    # listen on the loopback address: Ray does so where it supports no clusters of machines
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    "RAY_AUTH_MODE": "token",
    "RAY_SERVE_ENABLE_HA_PROXY": "0",
    # a replica that fails its health checks would drain first, for which it may be too stuck
    "RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS": "1",
    "RAY_enable_metrics_collection": "false",
    "RAY_DEDUP_LOGS": "0",  # lines of different requests look alike to Ray
    "RAY_COLOR_PREFIX": "0",
    "AUTOSCALER_METRIC_PORT": "0",
    "DASHBOARD_METRIC_PORT": "0",
}


def check_ray_is_installed() -> None:
    """Raise `ConfigError` if it is not."""
    from importlib.util import find_spec

    missing = [name for name in ("ray", "grpc", "aiohttp") if find_spec(name) is None]
    if missing:
        raise ConfigError(f"replicas: needs the package {missing[0]}: pip install 'gemserve[ray]'")


def prepare_environment(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set what Ray reads from the environment. What is set already stays, but for the token."""
    for name, value in _ENVIRONMENT.items():
        environment.setdefault(name, value)
    environment["RAY_AUTH_TOKEN"] = secrets.token_hex(32)


@contextmanager
def local_cluster(num_replicas: int, num_gpus: int) -> Iterator[None]:
    """A cluster of this machine alone, with no port beyond the loopback address.

    `num_gpus`: that replicas may share out among themselves.
    """
    import ray
    from ray import serve

    others = find_descendants()
    adopt_orphans()
    # sockets' paths must be short
    folder = tempfile.mkdtemp(prefix="gemserve-ray-")
    try:
        ray.init(
            address="local",
            num_cpus=num_replicas,
            num_gpus=num_gpus,
            include_dashboard=False,
            object_store_memory=OBJECT_STORE_BYTES,
            logging_level=logging.WARNING,
            log_to_driver=True,
            _temp_dir=folder,
        )
        signal.signal(signal.SIGTERM, _exit)  # Ray has set its own
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, _exit)
        serve.start(proxy_location="Disabled", logging_config=serve_logging())
        yield
    except SystemExit as end:
        # Ray's handler for SIGTERM, which is there until ours is, ends with the signal's number
        raise SystemExit(143 if end.code == signal.SIGTERM else end.code) from end
    finally:
        try:
            serve.shutdown()
        finally:
            ray.shutdown()
            # Ray's agents may notice only after a minute that nothing else is left
            end_processes(find_descendants() - others, _END_TIMEOUT_S)
            shutil.rmtree(folder, ignore_errors=True)


def _exit(number: int, _: object) -> None:
    """End in order: what was started is stopped on the way out."""
    sys.exit(128 + number)


def deploy(settings: ReplicaSettings, num_replicas: int, has_gpu: bool) -> DeploymentHandle[Any]:
    """Have Ray Serve start the replicas; they are not ready yet."""
    from ray import serve
    from ray.serve.api import RunTarget

    application = replica_deployment(num_replicas, has_gpu, _STOP_TIMEOUT_S).bind(settings)
    target = RunTarget(application, name=APPLICATION, route_prefix=None)
    return serve.run_many([target], wait_for_applications_running=False)[0]


def replica_deployment(num_replicas: int, has_gpu: bool, stop_timeout_s: float) -> Any:
    """The deployment `replica`, to be bound to its `ReplicaSettings`.

    `stop_timeout_s`: for a replica that Ray stops to end its running requests, and then itself.
    """
    from ray import serve
    from ray.serve.config import RequestRouterConfig

    from gemserve_fleet.replicas.ray_router import STATISTICS_PERIOD_S, TokenRouter
    from gemserve_fleet.replicas.replica import Replica

    return serve.deployment(
        Replica,
        name="replica",
        num_replicas=num_replicas,
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        max_queued_requests=MAX_QUEUED_REQUESTS,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=stop_timeout_s,
        graceful_shutdown_wait_loop_s=0.2,
        max_constructor_retry_count=1,  # a model that cannot be loaded cannot be loaded later
        logging_config=serve_logging(),
        ray_actor_options={
            "num_cpus": 1,
            "num_gpus": int(has_gpu),
        },
        request_router_config=RequestRouterConfig(
            request_router_class=TokenRouter,
            request_routing_stats_period_s=STATISTICS_PERIOD_S,
            request_routing_stats_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        ),
    )


def find_failure() -> str | None:
    """Why no replica can be started, as Ray Serve tells it; None while it may still succeed."""
    from ray import serve

    status = serve.status().applications.get(APPLICATION)
    if status is None or status.status != "DEPLOY_FAILED":
        return None
    texts = [deployment.message for deployment in status.deployments.values()]
    whole = "\n".join([status.message, *texts]).strip()
    ours = re.findall(r"^gemserve\.errors\.\w+: (.*)", whole, re.MULTILINE)  # of a traceback
    return ours[-1] if ours else whole[-_MOST_FAILURE_CHARS:]


def serve_logging() -> dict[str, Any]:
    """Ray Serve writes a line for each call otherwise; the application has its own log."""
    return {"log_level": "WARNING", "enable_access_log": False}
