"""Ways of sending requests to replicas, for comparison with this project's router."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from random import Random

from gemserve_fleet.replicas.replica_reports import ReplicaReports
from gemserve_fleet.replicas.routing import RoutedRequest, choose_replica
from gemserve_fleet.replicas.text_chunks import TextChunk
from gemserve_fleet.simulator.replica import Replica, SimulatedJob
from gemserve_fleet.simulator.request_cost import RequestCost


class Policy:
    """Chooses one of `replicas` for each job. `report` is called at regular times."""

    def __init__(self, replicas: Sequence[Replica], cost: RequestCost, seed: int) -> None:
        self.replicas = replicas
        self.cost = cost
        self.random = Random(seed)

    def choose(self, job: SimulatedJob) -> int:
        raise NotImplementedError

    def report(self) -> None:
        """Take the replicas' reports."""


class RandomReplica(Policy):
    def choose(self, job: SimulatedJob) -> int:
        return self.random.randrange(len(self.replicas))


class ConsistentHash(Policy):
    """Always the same replica for the same document, however long its queue is."""

    def __init__(self, replicas: Sequence[Replica], cost: RequestCost, seed: int) -> None:
        super().__init__(replicas, cost, seed)
        self._homes: dict[int, int] = {}

    def choose(self, job: SimulatedJob) -> int:
        if job.document not in self._homes:
            self._homes[job.document] = max(
                range(len(self.replicas)), key=lambda index: _hash(job.document, index)
            )
        return self._homes[job.document]


class LeastLoaded(Policy):
    """The shortest queue in tokens, as the replicas have reported it and with what was sent since.

    This is the project's router, but it is not told of any text.
    """

    sees_documents = False

    def __init__(self, replicas: Sequence[Replica], cost: RequestCost, seed: int) -> None:
        super().__init__(replicas, cost, seed)
        self._costs = cost.token_costs()
        self._reports = ReplicaReports()
        self._reports.set_replicas(map(str, range(len(replicas))))
        self._num_reports = 0
        self._follows = self.sees_documents and all(
            replica.cache.can_hold(cost.num_pieces) for replica in replicas
        )
        self._under_way: list[
            tuple[SimulatedJob, str, int]
        ] = []  # where to, and the router's number
        for index in range(len(replicas)):
            self._reports.cache_listed(str(index), 0, [])

    def choose(self, job: SimulatedJob) -> int:
        route = choose_replica(
            self._request(job),
            self._reports.states(),
            self._costs,
            random=self.random,
        )
        assert route is not None
        number = self._reports.sent(route, keys=job.keys if self._follows else ())
        self._under_way.append((job, route.name, number))
        return int(route.name)

    def report(self) -> None:
        self._num_reports += 1
        for index, replica in enumerate(self.replicas):
            queued = replica.queued_s / self.cost.filtered_token_s
            queued += replica.left_answer_tokens * self._costs.answered
            self._reports.reported(str(index), queued_tokens=queued, last_received=None)
            stored, dropped = replica.cache.take_changes()
            self._reports.cache_changed(
                str(index), self._num_reports, stored=stored, dropped=dropped
            )
        for job, name, number in self._under_way:
            if job.finished_s is not None:
                self._reports.ended(name, number)
        self._under_way = [entry for entry in self._under_way if entry[0].finished_s is None]

    def _request(self, job: SimulatedJob) -> RoutedRequest:
        tokens = self.cost.piece_tokens
        sees = self.sees_documents
        return RoutedRequest(
            chunks=tuple(TextChunk(key, tokens) for key in job.keys) if sees else (),
            reading=self.cost.reading,
            beside_tokens=0 if sees else self.cost.num_pieces * tokens,
            kept_tokens=self.cost.kept_tokens,
            answer_tokens=self.cost.answer_tokens,
        )


class TokenRouter(LeastLoaded):
    """The project's router: `gemserve_fleet.replicas.routing`."""

    sees_documents = True


def _hash(document: int, index: int) -> bytes:
    return hashlib.blake2b(f"{document} {index}".encode(), digest_size=8).digest()


POLICIES: Mapping[str, Callable[[Sequence[Replica], RequestCost, int], Policy]] = {
    "router": TokenRouter,
    "consistent hash": ConsistentHash,
    "least loaded": LeastLoaded,
    "random": RandomReplica,
}
