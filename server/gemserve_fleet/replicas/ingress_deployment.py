"""The ingress as a deployment of Ray Serve, for clusters whose own proxies listen: KubeRay.

`gemserve serve --replicas` does not use it: there the ingress has a server of its own, whose limits
on connections Ray's proxy does not have. There is one such ingress, because it counts what each
key uses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gemserve.config import ServerConfig
from gemserve_fleet.replicas.cluster import (
    HEALTH_CHECK_PERIOD_S,
    HEALTH_CHECK_TIMEOUT_S,
    replica_deployment,
    serve_logging,
)
from gemserve_fleet.replicas.ingress import create_ingress
from gemserve_fleet.replicas.ingress_metrics import IngressMetrics
from gemserve_fleet.replicas.ray_replicas import RayReplicas
from gemserve_fleet.replicas.replica import ReplicaSettings, log_to_stderr
from gemserve_fleet.replicas.router_link import ROUTER_LINK

# So that it tells clients of replicas that have not ended their requests within the drain.
_LONGER_DRAIN_S = 30.0
# A cluster without its head is lost in any case. So the ingress is there, and the loss of any other
# node ends no stream but those of its replicas.
_ON_HEAD = {"node:__internal_head__": 0.001}


class IngressDeployment:
    """`replicas`: the handle that Ray makes of the bound deployment."""

    def __init__(self, server: ServerConfig, replicas: DeploymentHandle[Any]) -> None:
        log_to_stderr()
        self._server = server
        self._replicas = RayReplicas(replicas)
        self._num_wanted = 0

    def reconfigure(self, config: Mapping[str, int]) -> None:
        """Take `num_replicas`. Ray calls this at the start and when it changes.

        As an argument of `__init__` it would have Ray replace the ingress, with all that it knows.
        """
        self._num_wanted = config["num_replicas"]

    def __serve_build_asgi_app__(self) -> ASGIApp:
        metrics = IngressMetrics(lambda: self._num_wanted)
        ROUTER_LINK.on_failure = metrics.router_failures.inc
        return _without_request_id(create_ingress(self._replicas, self._server, metrics))


def _without_request_id(app: ASGIApp) -> ASGIApp:
    """Ray's proxy gives requests their ids, and puts the header of the reply itself."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_without_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
                message = {**message, "headers": headers}
            await send(message)

        await app(scope, receive, send_without_id)

    return answer


def application(
    settings: ReplicaSettings, num_replicas: int, *, has_gpu: bool, drain_s: float
) -> Any:
    """The application for `serve run`: the ingress, bound to the replicas.

    `drain_s`: for running requests, when replicas are replaced, moved or become fewer.
    """
    ingress = serve.deployment(
        serve.ingress()(IngressDeployment),
        name="ingress",
        num_replicas=1,
        user_config={"num_replicas": num_replicas},
        max_ongoing_requests=settings.server.max_connections,
        max_queued_requests=settings.server.max_connections,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        health_check_timeout_s=HEALTH_CHECK_TIMEOUT_S,
        graceful_shutdown_timeout_s=drain_s + _LONGER_DRAIN_S,
        logging_config=serve_logging(),
        ray_actor_options={"num_cpus": 0, "resources": _ON_HEAD},
    )
    replicas = replica_deployment(num_replicas, has_gpu, drain_s).bind(settings)
    return ingress.bind(settings.server, replicas)
