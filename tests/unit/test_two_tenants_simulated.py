"""Two API keys, one of which attacks, on a simulated clock: the scheduler, its pace and its shares.

A step costs what it costs on about one processor core with the built-in model. Passes pause at
their own places only.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import mean

import pytest

from gemserve.engine.memory import MemoryPool
from gemserve.engine.scheduling.pace import Crowd, Pace
from gemserve.engine.scheduling.scheduler import Scheduler
from gemserve.engine.scheduling.time_shares import Presence, loads_of
from gemserve.engine.sequence.sequence import LiveSequence, State
from gemserve.engine.sequence.step_plan import Chunk, StepOutput
from tests.unit.test_fair_shares import ALICE, BOB, of
from tests.unit.test_scheduler import LAYERS, sequence

FIXED_S, ROW_S, TOKEN_S, PIECE_S = 0.002, 0.001, 0.0001, 0.02
CHUNK_TOKENS = 800
PROBE_TOKENS, STREAM_TOKENS = 600, 200


@dataclass
class Simulation:
    """The engine's loop, and clients that send again when they are answered."""

    is_shared: bool
    now_s: float = 0.0
    num_added: int = 0
    left_s: dict[int, float] = field(default_factory=dict)  # of the chunks under way
    on_end: dict[int, Callable[[], None]] = field(default_factory=dict)
    arrived_s: dict[int, float] = field(default_factory=dict)
    ttfts_s: list[float] = field(default_factory=list)
    gaps_s: list[float] = field(default_factory=list)
    last_s: float | None = None

    def __post_init__(self) -> None:
        pool = MemoryPool(2 * LAYERS * 400_000)
        self.scheduler = Scheduler(pool, num_layers=LAYERS, max_running=256)
        self.pace, self.present = Pace(0.25), Presence()
        self.probes: set[int] = set()
        self.streams: set[int] = set()
        self.due: list[tuple[float, Callable[[], None]]] = []

    def send(
        self, tenant: bytes, prompt: int, answer: int, on_end: Callable[[], None]
    ) -> LiveSequence:
        self.num_added += 1
        made = of(tenant, sequence(self.num_added, prompt, None, answer))
        self.scheduler.add(made)
        self.present.arrive(tenant)
        self.on_end[made.order], self.arrived_s[made.order] = on_end, self.now_s
        return made

    def attack(self, at_once: int, prompt: int, answer: int) -> None:
        def again() -> None:
            self.send(ALICE, prompt, answer, again)

        for _ in range(at_once):
            again()

    def be_polite(self) -> None:
        def stream() -> None:
            self.last_s = None
            self.streams = {self.send(BOB, 10, STREAM_TOKENS, stream).order}

        def probe() -> None:
            self.probes.add(self.send(BOB, PROBE_TOKENS, 2, rest).order)

        def rest() -> None:
            self.due.append((self.now_s + 0.3, probe))

        stream()
        probe()

    def run(self, seconds: float) -> None:
        ends_s = self.now_s + seconds
        while self.now_s < ends_s:
            ready = [act for at_s, act in self.due if at_s <= self.now_s]
            self.due = [(at_s, act) for at_s, act in self.due if at_s > self.now_s]
            for act in ready:
                act()
            if self.scheduler.is_idle:
                self.now_s += 0.001
            else:
                self.step()

    def step(self) -> None:
        running, waiting = self.scheduler.running, self.scheduler.waiting
        decoding = sum(s.state is State.DECODING for s in running)
        portion = None
        if self.is_shared and self.present.is_shared(self.now_s):
            loads = loads_of([*running, *waiting], lambda s: s.state is State.DECODING)
            portion = self.pace.divide(loads)
        crowd = Crowd(decoding, len(running) + len(waiting) - decoding, portion)
        plan = self.scheduler.schedule(
            CHUNK_TOKENS,
            is_decode_due=self.pace.is_decode_due(crowd),
            portion=portion,
        )
        is_done = False
        if plan.decodes:
            taken_s = FIXED_S + ROW_S * len(plan.decodes)
            self.pace.observe_decode(taken_s, len(plan.decodes), portion)
        else:
            assert plan.chunk is not None
            taken_s, is_done = self.read(plan.chunk, self.pace.slice_s(crowd))
            self.pace.observe_slice(taken_s, portion)
        self.now_s += taken_s
        tokens = {row.sequence: [1] for row in plan.decodes}
        if plan.chunk is not None and is_done and plan.chunk.is_last:
            tokens[plan.chunk.sequence] = [1]
        sequences = self.scheduler.sequences
        finished = [
            number
            for number in tokens
            if len(sequences[number].generated) + 1 == sequences[number].request.sampling.max_tokens
        ]
        self.note(tokens)
        tenants = {number: sequences[number].request.tenant for number in finished}
        self.scheduler.commit(
            plan,
            StepOutput(
                is_chunk_done=is_done,
                taken_s=taken_s,
                tokens=tokens,
                finished=frozenset(finished),
            ),
        )
        for number in finished:
            self.present.leave(tenants[number], self.now_s)
            self.on_end.pop(number)()

    def read(self, chunk: Chunk, slice_s: float) -> tuple[float, bool]:
        left_s = self.left_s.pop(chunk.sequence, chunk.count * TOKEN_S)
        taken_s = min(left_s, PIECE_S * max(1, math.ceil(slice_s / PIECE_S)))
        if left_s - taken_s > 1e-9:
            self.left_s[chunk.sequence] = left_s - taken_s
        return taken_s, left_s - taken_s <= 1e-9

    def note(self, tokens: dict[int, int]) -> None:
        for number in self.probes & tokens.keys():
            self.ttfts_s.append(self.now_s - self.arrived_s[number])
            self.probes.remove(number)
        if self.streams & tokens.keys():
            if self.last_s is not None:
                self.gaps_s.append(self.now_s - self.last_s)
            self.last_s = self.now_s


def polite(attack: tuple[int, int, int] | None, is_shared: bool = True) -> tuple[float, float]:
    """The slowest first token, and the mean time between a stream's tokens, in seconds."""
    simulation = Simulation(is_shared)
    if attack is not None:
        simulation.attack(*attack)
    simulation.run(5)
    simulation.be_polite()
    simulation.run(2)
    simulation.ttfts_s.clear()
    simulation.gaps_s.clear()
    simulation.run(15)
    assert len(simulation.ttfts_s) > 10
    return max(simulation.ttfts_s), mean(simulation.gaps_s)


ATTACKS = {
    "choices": (96, 20, 400),
    "flood": (64, 300, 48),
    "long texts": (6, 40_000, 16),
    "one long answer": (1, 20, 10_000),
    "echoes": (8, 1200, 1),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_a_polite_key_keeps_its_part_beside_an_attack(name: str) -> None:
    alone_ttft_s, alone_gap_s = polite(None)
    ttft_s, gap_s = polite(ATTACKS[name])
    assert ttft_s <= 3 * alone_ttft_s
    assert gap_s <= 2.1 * alone_gap_s


def test_without_shares_it_does_not() -> None:
    """Else the test above would show nothing."""
    _, alone_gap_s = polite(None)
    assert polite(ATTACKS["choices"], is_shared=False)[1] > 10 * alone_gap_s
