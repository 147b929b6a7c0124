"""One replica: a processor that reads prompts and decodes, memory, and a cache of documents.

It does what `engine/scheduling` does, but continuously. Between two of its events (a prompt is
read, an answer ends, a request comes) all speeds are constant:

- While answers are written and prompts wait, both share the time as `Pace` divides it.
- Reading goes in turn to the first prompt and to the one that is nearest its end.
- All answers advance together, one token a step.
- A request is admitted if its memory is free; the cache gives way. One whose document is being read
  by another waits for that, and takes it from the cache.
- The cache has its own copy of what a request holds. (The engine shares some of it.)
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from math import inf

from gemserve.engine.scheduling.admission import MOST_READING
from gemserve.engine.scheduling.pace import LEAST_PER_DECODE, MOST_PER_DECODE
from gemserve_fleet.simulator.piece_cache import PieceCache
from gemserve_fleet.simulator.request_cost import RequestCost

_DONE_S = 1e-9
_DONE_TOKENS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaMemory:
    """Bytes for all keys and values, and how many of them the document cache may hold."""

    kv_bytes: int
    cache_bytes: int
    max_running: int = 256
    step_target_s: float = 0.25


@dataclass(slots=True, eq=False)
class SimulatedJob:
    """A request on its way. `keys`: of its document's pieces."""

    number: int
    document: int
    keys: tuple[bytes, ...]
    arrived_s: float
    num_cached: int = 0
    remaining_s: float = 0.0  # of reading; an estimate until it is admitted
    is_leader: bool = False  # others wait for what it reads
    first_token_s: float | None = None
    finished_s: float | None = None


@dataclass(slots=True)
class BusyTime:
    """Seconds that a replica has spent."""

    reading_s: float = 0.0
    decoding_s: float = 0.0


@dataclass(slots=True)
class _Decoding:
    """Answers that are being written. `tokens`: how many each of them has got since the start.

    An answer ends when `tokens` is as far as when it began plus its length.
    """

    tokens: float = 0.0
    ends: list[tuple[float, int, SimulatedJob]] = field(default_factory=list)  # a heap
    sum_of_ends: float = 0.0

    @property
    def left_tokens(self) -> float:
        return max(0.0, self.sum_of_ends - len(self.ends) * self.tokens)


class Replica:
    """Advanced from outside, from event to event."""

    def __init__(self, cost: RequestCost, memory: ReplicaMemory) -> None:
        self.busy = BusyTime()
        self.cache = PieceCache(cost.piece_bytes, memory.cache_bytes)
        self._cost = cost
        self._memory = memory
        self._now_s = 0.0
        self._waiting: deque[SimulatedJob] = deque()
        self._awaiting: dict[int, list[SimulatedJob]] = {}  # by the document that another reads
        self._first: SimulatedJob | None = None  # the prompt that is read longest
        self._others: list[tuple[float, int, SimulatedJob]] = []  # a heap by what remains
        self._order: dict[int, SimulatedJob] = {}  # all that are read, in the order of admission
        self._decoding = _Decoding()
        self._held_bytes = 0
        self._unread_s = 0.0

    @property
    def num_requests(self) -> int:
        return self._num_unread + len(self._decoding.ends)

    @property
    def held_bytes(self) -> int:
        """Of requests that run, without the cache."""
        return self._held_bytes

    @property
    def queued_s(self) -> float:
        """Seconds of reading that it still has to do."""
        return max(0.0, self._unread_s)

    @property
    def left_answer_tokens(self) -> float:
        """Tokens of the answers that it still has to write."""
        return self._decoding.left_tokens + self._num_unread * self._cost.answer_tokens

    @property
    def _num_unread(self) -> int:
        awaiting = sum(map(len, self._awaiting.values()))
        return len(self._waiting) + awaiting + len(self._order)

    def submit(self, job: SimulatedJob) -> None:
        """Take a request now. `advance` must have been called with this time."""
        job.remaining_s = self._cost.reading_s(self.cache.count(job.keys))
        self._unread_s += job.remaining_s
        self._waiting.append(job)
        self._admit()

    def next_event_s(self) -> float:
        """When something ends here, if nothing comes before that."""
        reading, decoding = self._shares()
        event = inf
        if reading:
            first, other = self._turns()
            assert first is not None
            if other is None:
                event = first.remaining_s / reading
            else:
                event = min(first.remaining_s, other.remaining_s) / (reading / 2)
        if decoding:
            left = self._decoding.ends[0][0] - self._decoding.tokens
            event = min(event, left * self._step_s() / decoding)
        return self._now_s + max(0.0, event)

    def advance(self, now_s: float) -> list[SimulatedJob]:
        """Go on to `now_s`, which is not behind the next event. Return the jobs that finished."""
        passed = now_s - self._now_s
        reading, decoding = self._shares()
        self._now_s = now_s
        if reading:
            self._read(reading * passed)
        if decoding:
            self._decoding.tokens += decoding * passed / self._step_s()
        self.busy.reading_s += reading * passed
        self.busy.decoding_s += decoding * passed
        return self._complete()

    def _shares(self) -> tuple[float, float]:
        """The shares of time in which prompts are read and answers are written."""
        if not self._order:
            return 0.0, 1.0 if self._decoding.ends else 0.0
        num_decoding = len(self._decoding.ends)
        if not num_decoding:
            return 1.0, 0.0
        step_s = self._step_s()
        multiple = LEAST_PER_DECODE * max(1.0, self._num_unread / num_decoding)
        slice_s = min(self._memory.step_target_s, min(MOST_PER_DECODE, multiple) * step_s)
        return slice_s / (slice_s + step_s), step_s / (slice_s + step_s)

    def _step_s(self) -> float:
        return self._cost.decode_step_s(len(self._decoding.ends))

    def _turns(self) -> tuple[SimulatedJob | None, SimulatedJob | None]:
        """The prompts between which reading alternates. The first may also be nearest its end."""
        if self._first is None or not self._others:
            return self._first, None
        nearest = self._others[0][2]
        is_nearest = self._first.remaining_s <= nearest.remaining_s
        return self._first, None if is_nearest else nearest

    def _read(self, seconds: float) -> None:
        first, other = self._turns()
        assert first is not None
        self._unread_s -= seconds
        if other is None:
            first.remaining_s -= seconds
            return
        first.remaining_s -= seconds / 2
        other.remaining_s -= seconds / 2
        # it was the smallest of the heap, and stays so
        self._others[0] = other.remaining_s, other.number, other

    def _complete(self) -> list[SimulatedJob]:
        finished: list[SimulatedJob] = []
        while self._others and self._others[0][2].remaining_s <= _DONE_S:
            self._finish_reading(heappop(self._others)[2], finished)
        while self._first is not None and self._first.remaining_s <= _DONE_S:
            self._finish_reading(self._first, finished)
        ends = self._decoding.ends
        while ends and ends[0][0] <= self._decoding.tokens + _DONE_TOKENS:
            end, _, job = heappop(ends)
            self._decoding.sum_of_ends -= end
            self._finish(job, finished)
        self._admit()
        return finished

    def _finish_reading(self, job: SimulatedJob, finished: list[SimulatedJob]) -> None:
        self._unread_s -= job.remaining_s
        del self._order[job.number]
        if job is self._first:
            self._first = next(iter(self._order.values()), None)
            self._others = [entry for entry in self._others if entry[2] is not self._first]
            heapify(self._others)
        job.first_token_s = self._now_s
        self._held_bytes += self._cost.decoding_bytes - self._cost.peak_bytes
        self.cache.store(job.keys, self._memory.kv_bytes - self._held_bytes)
        if job.is_leader:
            self._waiting.extendleft(reversed(self._awaiting.pop(job.document)))
        if not self._cost.answer_tokens:
            self._finish(job, finished)
            return
        end = self._decoding.tokens + self._cost.answer_tokens
        heappush(self._decoding.ends, (end, job.number, job))
        self._decoding.sum_of_ends += end

    def _finish(self, job: SimulatedJob, finished: list[SimulatedJob]) -> None:
        self._held_bytes -= self._cost.decoding_bytes
        job.finished_s = self._now_s
        finished.append(job)

    def _admit(self) -> None:
        """Admit what fits. A much shorter one overtakes those that may not take from the cache."""
        size, staying = self._cost.peak_bytes, list[SimulatedJob]()
        while self._waiting:
            job = self._waiting.popleft()
            if job.document in self._awaiting:
                self._awaiting[job.document].append(job)
                continue
            running = len(self._order) + len(self._decoding.ends)
            left = self._memory.kv_bytes - self._held_bytes - size
            if running >= self._memory.max_running or left < 0:
                staying.append(job)
                break
            if left >= self._memory.cache_bytes or self._may_take_from_cache(job):
                self._held_bytes += size
                self._begin(job)
                self.cache.shrink(left)
            else:
                staying.append(job)
        self._waiting.extendleft(reversed(staying))

    def _may_take_from_cache(self, job: SimulatedJob) -> bool:
        """Are few prompts being read, or is this one much shorter than all of them?"""
        if len(self._order) < MOST_READING:
            return True
        least_s = min(reading.remaining_s for reading in self._order.values())
        return 2 * self._cost.reading_s(self.cache.count(job.keys)) < least_s

    def _begin(self, job: SimulatedJob) -> None:
        job.num_cached = self.cache.use(job.keys)
        needed_s = self._cost.reading_s(job.num_cached)
        self._unread_s += needed_s - job.remaining_s
        job.remaining_s = needed_s
        if job.num_cached < len(job.keys) and self.cache.can_hold(len(job.keys)):
            job.is_leader = True
            self._awaiting[job.document] = []
        self._order[job.number] = job
        if self._first is None:
            self._first = job
        else:
            heappush(self._others, (job.remaining_s, job.number, job))
