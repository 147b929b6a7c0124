"""Sends a load to a fleet of simulated replicas, and says how long requests take there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from math import inf

import numpy as np

from gemserve_fleet.simulator.load import Arrival
from gemserve_fleet.simulator.policies import POLICIES
from gemserve_fleet.simulator.replica import Replica, ReplicaMemory, SimulatedJob
from gemserve_fleet.simulator.request_cost import RequestCost

REPORT_S = 1.0  # between two reports of a replica
WARM_UP = 0.25  # of the requests, which fill the caches; nothing of them is counted


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a fleet did with a load, after the warm-up.

    `hit_rate`: the share of document tokens that were found in caches; `repeat_rate`: the share
    that had been sent before in this run, which no cache can exceed. `ttft_…_s`: mean and
    percentiles of the time to the first token; `answer_p95_s`: of the time to the last.
    `requests_per_s`: finished between the end of the warm-up and the last arrival.
    `reading_share`, `decoding_share`: means of that time; `busiest`: the share of both together on
    the busiest replica.
    """

    policy: str
    num_replicas: int
    num_sent: int
    num_finished: int
    hit_rate: float
    repeat_rate: float
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    ttft_p99_s: float
    answer_p95_s: float
    requests_per_s: float
    reading_share: float
    decoding_share: float
    busiest: float


class Fleet:
    """Replicas, and the times of their next events."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        self.replicas = replicas
        self._events: list[tuple[float, int, int]] = []  # a heap: time, version, replica
        self._versions = [0] * len(replicas)

    def run_events(self, until_s: float) -> list[SimulatedJob]:
        """Run all events up to a time. Return the jobs that finished."""
        finished: list[SimulatedJob] = []
        while self._events and self._events[0][0] <= until_s:
            now_s, version, index = heappop(self._events)
            if version == self._versions[index]:  # the replica has not changed since
                finished += self.replicas[index].advance(now_s)
                self._expect(index)
        return finished

    def submit(self, index: int, job: SimulatedJob) -> None:
        self.replicas[index].advance(job.arrived_s)
        self.replicas[index].submit(job)
        self._expect(index)

    def advance(self, now_s: float) -> None:
        """Bring all replicas to a time before their next events."""
        for replica in self.replicas:
            replica.advance(now_s)

    def busy(self) -> list[tuple[float, float]]:
        return [(replica.busy.reading_s, replica.busy.decoding_s) for replica in self.replicas]

    def _expect(self, index: int) -> None:
        self._versions[index] += 1
        time_s = self.replicas[index].next_event_s()
        if time_s < inf:
            heappush(self._events, (time_s, self._versions[index], index))


def simulate(
    cost: RequestCost,
    memory: ReplicaMemory,
    arriving: Sequence[Arrival],
    *,
    num_replicas: int,
    policy: str = "router",
    seed: int = 0,
) -> Outcome:
    """Send `arriving` to `num_replicas` replicas, and wait until all have been answered.

    A request must fit into `memory` alone (`RequestCost.peak_bytes`).
    """
    assert cost.peak_bytes <= memory.kv_bytes
    replicas = [Replica(cost, memory) for _ in range(num_replicas)]
    fleet = Fleet(replicas)
    chooser = POLICIES[policy](replicas, cost, seed)
    jobs: list[SimulatedJob] = []
    finished: list[SimulatedJob] = []
    num_warm = int(WARM_UP * len(arriving))
    before = fleet.busy()
    report_s = 0.0
    for arrival in arriving:
        latest_s = arrival.time_s // REPORT_S * REPORT_S
        if latest_s > report_s:  # reports before it have changed no choice
            report_s = latest_s
            finished += fleet.run_events(report_s)
            fleet.advance(report_s)
            chooser.report()
        finished += fleet.run_events(arrival.time_s)
        job = _job(len(jobs), arrival, cost)
        if len(jobs) == num_warm:
            fleet.advance(arrival.time_s)
            before = fleet.busy()
        jobs.append(job)
        fleet.submit(chooser.choose(job), job)
    last_s = jobs[-1].arrived_s
    fleet.advance(last_s)
    after = fleet.busy()
    finished += fleet.run_events(inf)
    return _outcome(policy, jobs, num_warm, finished, before, after)


def _job(number: int, arrival: Arrival, cost: RequestCost) -> SimulatedJob:
    keys = tuple(f"{arrival.document}/{piece}".encode() for piece in range(cost.num_pieces))
    return SimulatedJob(number, arrival.document, keys, arrival.time_s)


def _outcome(
    policy: str,
    jobs: Sequence[SimulatedJob],
    num_warm: int,
    finished: Sequence[SimulatedJob],
    before: Sequence[tuple[float, float]],
    after: Sequence[tuple[float, float]],
) -> Outcome:
    counted = jobs[num_warm:]
    start_s, stop_s = counted[0].arrived_s, jobs[-1].arrived_s
    passed = max(stop_s - start_s, 1e-12)
    ttft = [job.first_token_s - job.arrived_s for job in counted if job.first_token_s is not None]
    times = [job.finished_s - job.arrived_s for job in counted if job.finished_s is not None]
    ends = [job.finished_s for job in finished if job.finished_s is not None]
    seen = {job.document for job in jobs[:num_warm]}
    num_repeats = 0
    for job in counted:
        num_repeats += job.document in seen
        seen.add(job.document)
    busy = (np.array(after) - np.array(before)) / passed  # [replicas, 2]
    p50, p95, p99 = np.percentile(ttft, [50, 95, 99]).tolist()
    num_pieces = sum(len(job.keys) for job in counted)
    return Outcome(
        policy=policy,
        num_replicas=len(after),
        num_sent=len(jobs),
        num_finished=len(finished),
        hit_rate=sum(job.num_cached for job in counted) / num_pieces,
        repeat_rate=num_repeats / len(counted),
        ttft_mean_s=float(np.mean(ttft)),
        ttft_p50_s=p50,
        ttft_p95_s=p95,
        ttft_p99_s=p99,
        answer_p95_s=float(np.percentile(times, 95)),
        requests_per_s=sum(start_s < end <= stop_s for end in ends) / passed,
        reading_share=float(busy[:, 0].mean()),
        decoding_share=float(busy[:, 1].mean()),
        busiest=float(busy.sum(axis=1).max()),
    )
