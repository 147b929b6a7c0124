"""The document cache in seeded random traces: what is copied is what a pass would write."""

from __future__ import annotations

import os
from random import Random

from gemserve.engine.memory import MemoryPool
from gemserve.engine.scheduling.scheduler import Scheduler
from gemserve.kv_layout import KVLayout
from tests.unit.test_document_cache import (
    ALL_GROW,
    LAYERS,
    FakeAdapter,
    FakeMemory,
    perform,
    sequence,
)

_MOST = 600, 5000  # tokens that a filter may keep
TRACES = int(os.environ.get("GEMSERVE_TEST_TRACES", "80"))


def _windowed(window: int, saves: bool) -> KVLayout:
    return KVLayout(growing=3, windowed=LAYERS - 3, window=window, saves=saves)


def run_trace(seed: int) -> tuple[int, int, int]:
    rng = Random(seed)
    documents = [[d] * rng.randrange(300, 1200) for d in (1, 2, 3)]
    tenants, layers = rng.choice(((b"",), (b"a", b"b"))), rng.choice(((2,), (2, 3)))
    adapters = rng.choice(((None,), (None, FakeAdapter("x", "1"), FakeAdapter("x", "2"))))
    capacity, share = rng.randrange(10_000, 60_000), rng.choice((0.0, 0.2, 0.5, 1.0))
    layout = rng.choice((ALL_GROW, *(_windowed(window, share > 0) for window in (24, 48, 300))))
    s = Scheduler(
        MemoryPool(capacity),
        num_layers=LAYERS,
        max_running=rng.choice((1, 4, 64)),
        cache_units=int(capacity * share),
        layout=layout,
    )
    memory = FakeMemory(capacity, layout)
    everyone = []
    whole_share, num_whole_hits = rng.choice((0.0, 0.3, 1.0)), 0
    for order in range(rng.randrange(2, 14)):
        turns = [rng.choice(documents)] + [[rng.randrange(9)] * 40] * rng.randrange(3)
        ids = [token for turn in turns for token in turn] + [rng.randrange(10, 99)] * 12
        made = sequence(
            order,
            ids,
            layer=rng.choice(layers),
            tenant=rng.choice(tenants),
            adapter=rng.choice(adapters),
            # as a planner limits it: a filter never keeps more than memory could hold
            limit=rng.choice((None, *(min(some, capacity // (2 * LAYERS) - 4) for some in _MOST))),
            is_whole=rng.random() < whole_share,
        )
        if s.fits_ever(made):
            everyone.append(made)
    pending = list(everyone)
    for _ in range(20_000):
        while pending and rng.random() < 0.3:
            s.add(pending.pop(0))
        if rng.random() < 0.02 and (s.running or s.waiting):
            s.finish(rng.choice([*s.running, *s.waiting]))
        plan = s.schedule(rng.choice((64, 300)), is_decode_due=rng.random() < 0.5)
        s.check_integrity()
        assert not plan.is_empty or s.is_idle, "work waits and nothing is planned"
        num_whole_hits += sum(copy.token_units == 2 * layout.growing for copy in plan.copies)
        s.commit(plan, perform(s, plan, memory, rng))
        s.check_integrity()
        if s.is_idle and not pending:
            break
    else:
        raise AssertionError("the trace did not end")
    assert s.pool.used == s.cache.used
    return s.cache.counts.hits, s.cache.counts.evictions, num_whole_hits


def test_random_traces() -> None:
    hits = evictions = whole_hits = 0
    for seed in range(TRACES):
        some_hits, some_evictions, some_whole_hits = run_trace(seed)
        hits, evictions = hits + some_hits, evictions + some_evictions
        whole_hits += some_whole_hits
    assert hits > TRACES // 4, "the traces hardly test the cache"
    assert whole_hits > TRACES // 8, "the traces hardly test prompts that are read whole"
    assert evictions > TRACES // 40
