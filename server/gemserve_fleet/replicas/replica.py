"""A replica: a model, its engine and the application, in a process that Ray Serve has started."""

from __future__ import annotations

import inspect
import logging
import os
import sys
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

from ray import serve

from gemserve.config import EngineConfig, ModelConfig, ServerConfig, also_named, served_name
from gemserve_fleet.replicas.messages import FromReplica, RelayedRequest
from gemserve_fleet.replicas.replica_choice import RoutingHints
from gemserve_fleet.replicas.replica_reports import QueueReport, report_of
from gemserve_fleet.replicas.segment_shares import FromPeer, SegmentShare

log = logging.getLogger("gemserve_fleet.replicas")


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """All that a replica is told at its start. `num_threads`: that its engine computes with."""

    num_threads: int
    model: ModelConfig
    engine: EngineConfig
    server: ServerConfig


class Replica:
    """The deployment's class. Its methods run on one event loop, beside the engine's thread."""

    def __init__(self, settings: ReplicaSettings) -> None:
        # Ray has set it by the CPUs that it counts, and torch reads it when it is imported
        os.environ["OMP_NUM_THREADS"] = str(settings.num_threads)
        # the model's libraries are imported here, and not where the deployment is defined
        from gemserve.api.access.backlog import Backlog
        from gemserve.api.app import create_app
        from gemserve.api.serving import build_serving
        from gemserve.api.telemetry.server_metrics import Metrics
        from gemserve.api.telemetry.traces import open_traces
        from gemserve.calibration.search.calibrated_core import build_calibrated_core
        from gemserve.engine.new_thread import call_in_new_thread, switch_threads_often
        from gemserve.engine.reader import CoreWithReader
        from gemserve_fleet.replicas.model_reading import model_reading
        from gemserve_fleet.replicas.ray_peers import RayPeers
        from gemserve_fleet.replicas.relayed_app import RelayedApp
        from gemserve_fleet.replicas.segment_sharing import SegmentSharing
        from gemserve_fleet.replicas.share_reading import ShareReader
        from gemserve_fleet.replicas.staged_adapters import StagedAdapters

        switch_threads_often()
        log_to_stderr()
        model, server = settings.model, settings.server
        core = call_in_new_thread(lambda: build_calibrated_core(model, settings.engine))
        looking = core.reader if isinstance(core, CoreWithReader) else core
        self._model = model_reading(
            replace(looking.config, filter_method=core.config.filter_method),
            looking.calibration,
            looking.model.shape,
            has_cache=looking.config.cache_memory > 0 and looking.model.has_reusable_beginnings,
        )
        name = served_name(model, server)
        # the ingress has replicas load the adapters, so that all have the same
        config = replace(server, adapters=())
        self._serving = build_serving(
            core, model_name=name, also_named=also_named(model, server), config=config
        )
        adapters = StagedAdapters(self._serving.adapters)
        self._traces = open_traces(server.otel)
        self._name = serve.get_replica_context().replica_id.unique_id
        peers = RayPeers(self._name)

        def new_sharing(backlog: Backlog, metrics: Metrics) -> SegmentSharing:
            engine = self._serving.engine
            return SegmentSharing(engine, backlog, peers, metrics.lent_segments())

        self._app = create_app(
            self._serving,
            self._traces,
            is_replica=True,
            load_adapter=adapters.stage,
            # a reader's pass is so short that lending it would cost more
            new_sharing=new_sharing if looking is core else None,
        )
        self._shares = ShareReader(
            self._serving.engine, self._serving.adapters, self._app.state.backlog
        )
        self._relayed = RelayedApp(self._app, self._app.state.documents, adapters, self._name)
        self._num_reports = self._last_received = 0
        log.info("replica %s is ready, process %d", self._name, os.getpid())

    async def answer(
        self, hints: RoutingHints, request: RelayedRequest
    ) -> AsyncGenerator[list[FromReplica] | QueueReport, None]:
        """See `RelayedApp.answer`. The router has read the hints. What waits here comes last."""
        self._last_received = max(self._last_received, hints.number)
        async for batch in self._relayed.answer(request, hints.chunks, hints.prompt_tokens):
            yield batch
        self._num_reports += 1
        yield QueueReport(
            replica=self._name,
            number=self._num_reports,
            queued_tokens=self._queued_tokens,
            last_received=self._last_received,
        )

    async def read_share(
        self, _: RoutingHints, share: SegmentShare
    ) -> AsyncGenerator[FromPeer, None]:
        """See `ShareReader.read`."""
        async with aclosing(self._shares.read(share)) as parts:
            async for part in parts:
                yield part

    async def call(self, hints: RoutingHints, method: str, *arguments: Any) -> Any:
        """Call another method of `RelayedApp`."""
        result = getattr(self._relayed, method)(*arguments)
        return await result if inspect.isawaitable(result) else result

    def record_routing_stats(self) -> dict[str, Any]:
        """What the router learns of this replica, every second."""
        self._num_reports += 1
        return report_of(
            self._num_reports,
            queued_tokens=self._queued_tokens,
            last_received=self._last_received,
            cached=self._relayed.cached_keys(),
            model=self._model,
        )

    @property
    def _queued_tokens(self) -> int:
        return int(self._app.state.backlog.tokens_left + self._relayed.arriving_tokens)

    def check_health(self) -> None:
        """Raise if the engine is dead or stuck. After the third time Ray ends the process."""
        engine, watchdog = self._serving.engine, self._serving.watchdog
        if engine.death is not None:
            raise RuntimeError(f"the engine is dead: {engine.death}")
        if watchdog is not None and watchdog.is_stuck:
            raise RuntimeError(watchdog.complaint)

    def __del__(self) -> None:
        """Ray calls this when the replica is stopped and its requests have ended."""
        serving = getattr(self, "_serving", None)
        if serving is None:  # the model could not be loaded
            return
        if serving.watchdog is not None:
            serving.watchdog.stop()
        serving.engine.stop()
        if self._traces is not None:
            self._traces.shut_down()


def log_to_stderr() -> None:
    """Write the logs of gemserve to the process's standard error, which Ray passes on."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("%(levelname)s: %(message)s"))
    logger = logging.getLogger("gemserve")
    logger.setLevel(logging.INFO)
    logger.handlers[:] = [handler]
    logger.propagate = False
