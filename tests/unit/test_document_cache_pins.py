"""Stored documents in the cache: pins, and forgetting without a trace."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from random import Random

import pytest

from gemserve.engine.cache.document_cache import PINNED_SHARE
from gemserve.engine.memory import MemoryPool
from gemserve.engine.scheduling.scheduler import Scheduler
from gemserve.engine.sequence.sequence import LiveSequence, State
from gemserve.engine.worker import Engine
from gemserve.errors import EngineDead
from tests.fakes import FakeCore
from tests.unit.test_document_cache import (
    LAYERS,
    FakeMemory,
    cached,
    fingerprints,
    finish,
    perform,
    sequence,
)
from tests.unit.test_scheduler import kept_of

DOCUMENT = [7] * 1000


def stored(made: LiveSequence, *ids: str, pin: bool = False) -> LiveSequence:
    """The same prompt, which contains stored documents."""
    return LiveSequence(replace(made.request, documents=ids, pin=pin), made.order)


def test_a_pinned_document_outlives_all_others() -> None:
    s, memory = cached(capacity=40_000)  # documents may hold 20,000, pinned ones 10,000
    s.add(stored(sequence(0, DOCUMENT), "a", pin=True))
    finish(s, memory)
    for order in range(1, 8):
        s.add(sequence(order, [order + 10] * 1200))
        finish(s, memory)
    assert s.cache.counts.evictions > 0
    assert s.cache.stored()["a"].is_pinned
    s.add(sequence(9, DOCUMENT + [1] * 10))
    finish(s, memory)
    assert s.cache.counts.hits == 1


def test_a_pinned_document_gives_way_to_a_request_that_could_never_run_beside_it() -> None:
    """The request would wait for ever."""
    s = Scheduler(MemoryPool(12_000), num_layers=LAYERS, max_running=8, cache_units=12_000)
    memory = FakeMemory(12_000)
    s.add(stored(sequence(0, DOCUMENT), "a", pin=True))
    finish(s, memory)
    assert s.cache.pinned == 5000
    big = sequence(1, [9] * 2300)
    s.add(big)
    finish(s, memory)
    assert len(big.generated) == 4
    assert "a" not in s.cache.stored()


def test_a_request_that_fits_beside_a_pinned_document_waits_for_others() -> None:
    s = Scheduler(MemoryPool(13_000), num_layers=LAYERS, max_running=8, cache_units=13_000)
    memory = FakeMemory(13_000)
    s.add(stored(sequence(0, DOCUMENT), "a", pin=True))
    finish(s, memory)
    s.add(sequence(1, [8] * 1000))
    s.schedule(256, is_decode_due=True)
    s.add(waiting := sequence(2, [9] * 1000))
    s.schedule(256, is_decode_due=True)
    assert waiting.state is State.WAITING
    finish(s, memory)
    assert len(waiting.generated) == 4
    assert s.cache.stored()["a"].is_pinned


def test_pins_beyond_their_share_are_cached_but_not_pinned() -> None:
    s, memory = cached(capacity=40_000)
    for order, name in enumerate("abc"):
        s.add(stored(sequence(order, [order] * 900), name, pin=True))
        finish(s, memory)
    assert [s.cache.stored()[name].is_pinned for name in "abc"] == [True, True, False]
    assert s.cache.pinned <= PINNED_SHARE * 20_000


def test_a_pin_of_what_is_cached_already_pins_it() -> None:
    s, memory = cached()
    for order, pin in enumerate((False, True)):
        s.add(stored(sequence(order, DOCUMENT + [order] * 10), "a", pin=pin))
        finish(s, memory)
        assert s.cache.stored()["a"].is_pinned is pin
    assert s.cache.used == 1010 * 5


def test_a_pin_ends_what_is_remembered_of_what_may_give_way() -> None:
    """A document that is pinned gives way no more, though no memory has changed hands."""
    s, memory = cached()
    s.add(made := sequence(0, DOCUMENT))
    finish(s, memory)
    assert s.cache.available(1) == s.pool.capacity
    key = sequence(1, DOCUMENT).cache_key
    assert key is not None
    assert not s.cache.wants(key, made.tokens, 5000, ["a"], is_pinned=True)
    assert s.cache.available(1) == s.pool.capacity - 5000


def test_a_longer_conversation_does_not_unpin_its_document() -> None:
    s, memory = cached()
    s.add(stored(sequence(0, DOCUMENT), "a", pin=True))
    finish(s, memory)
    s.add(stored(sequence(1, DOCUMENT + [8] * 500), "a"))
    finish(s, memory)
    assert s.cache.pinned == 5000
    assert s.cache.used == 5000 + 2500  # the longer one begins in the pinned one's memory


def test_forgetting_finds_what_was_cached_before_the_document_was_stored() -> None:
    """A prompt with the pasted text was cached without the id, and a hit on it was not noted."""
    s, memory = cached()
    s.add(sequence(0, DOCUMENT))
    finish(s, memory)
    s.add(stored(sequence(1, DOCUMENT + [1] * 10), "a"))
    finish(s, memory)
    s.forget_documents(["a"])
    assert s.cache.used == 0


def test_a_conversation_in_several_places_that_becomes_private_is_so_in_all() -> None:
    """Of a stored document's memory only the last place would have been overwritten."""
    s, memory = cached()
    for order, more in enumerate(([], [8] * 500)):
        s.add(sequence(order, DOCUMENT + more))
        finish(s, memory)
    s.add(stored(sequence(2, DOCUMENT + [8] * 500), "a"))
    finish(s, memory)
    (document,) = s.cache.documents
    assert [span.is_private for span in document.spans] == [True, True]


def test_forgetting_reaches_conversations_that_took_the_place_of_the_document() -> None:
    s, memory = cached()
    s.add(stored(sequence(0, DOCUMENT), "a"))
    finish(s, memory)
    s.add(sequence(1, DOCUMENT + [8] * 500))
    finish(s, memory)
    s.forget_documents(["b"])
    assert s.cache.used == 7500
    s.forget_documents(["a"])
    assert s.cache.used == 0


def test_nothing_of_a_forgotten_document_stays_behind_what_another_shares_of_it() -> None:
    """One that begins alike owned all of its memory, and held the deleted text's keys with it."""
    s, memory = cached()
    begin = [5] * 400
    deleted, other = stored(sequence(0, begin + DOCUMENT), "a"), sequence(1, begin + [8] * 1000)
    for made in (deleted, other):
        s.add(made)
        finish(s, memory)
    s.forget_documents(["a"])
    memory.move_and_copy(s.schedule(256, is_decode_due=True))
    assert set(fingerprints(deleted)[len(begin) :]).isdisjoint(memory.units)


@pytest.mark.parametrize("moment", ["running", "waiting", "later"])
def test_a_pass_stores_nothing_of_a_forgotten_document(moment: str) -> None:
    s, memory = cached()
    made = stored(sequence(0, DOCUMENT), "a", "b")
    if moment != "later":
        s.add(made)
    if moment == "running":
        s.schedule(100, is_decode_due=True)
    s.forget_documents(["b"])
    if moment == "later":
        s.add(made)
    finish(s, memory)
    assert len(made.generated) == 4
    assert s.cache.used == 0


def run_private_trace(seed: int) -> None:
    """Whatever happens, no unit that is free holds what a private span once held."""
    rng = Random(seed)
    capacity = rng.randrange(12_000, 40_000)
    s = Scheduler(
        MemoryPool(capacity),
        num_layers=LAYERS,
        max_running=rng.choice((1, 4)),
        cache_units=int(capacity * rng.choice((0.3, 1.0))),
    )
    memory, secret = FakeMemory(capacity), -7

    def check() -> None:
        memory.apply(s.pool.take_changes())
        s.check_integrity()
        spans = [r.memory for r in s.running]
        spans += [share.span for r in s.running for share in r.shared]
        spans += [span for document in s.cache.documents for span in document.spans]
        private = {
            unit
            for span in spans
            if span.is_private
            for unit in range(span.start, span.start + span.size)
        }
        for span in spans:
            if span.is_private:
                memory.units[span.start : span.start + span.size] = [secret] * span.size
        left = {unit for unit, value in enumerate(memory.units) if value == secret}
        assert left <= private, "memory of a stored document is free and was not overwritten"

    pending = []
    for order in range(12):
        name = rng.choice("abc")
        ids = [ord(name)] * rng.choice((300, 900)) + [order] * rng.choice((10, 300))
        made = sequence(order, ids, limit=rng.choice((None, 600)))
        if rng.random() < 0.7:
            made = stored(made, name, pin=rng.random() < 0.3)
        if s.fits_ever(made):
            pending.append(made)
    for _ in range(5000):
        while pending and rng.random() < 0.4:
            s.add(pending.pop(0))
        if rng.random() < 0.05 and s.running:
            s.finish(rng.choice(s.running))
        if rng.random() < 0.02:
            s.forget_documents([rng.choice("abc")])
        check()
        plan = s.schedule(300, is_decode_due=rng.random() < 0.5)
        memory.apply(plan.moves)
        check()
        kept = {}
        chunk = plan.chunk
        if chunk is not None and chunk.is_filter and chunk.is_last:
            reader = s.sequences[chunk.sequence]
            kept[chunk.sequence] = kept_of(reader, range(min(reader.num_prompt, 16)))
        output = perform(s, replace(plan, moves=(), copies=(), chunk=None), memory, rng)
        tokens = dict(output.tokens)
        if chunk is not None and not chunk.is_filter and chunk.is_last:
            tokens[chunk.sequence] = [1]
        s.commit(plan, replace(output, tokens=tokens, kept=kept))
        check()
        if s.is_idle and not pending:
            break
    else:
        raise AssertionError("the trace did not end")
    s.forget_documents("abc")
    check()
    assert not any(document.ids for document in s.cache._documents)
    s.cache.make_room(capacity)
    check()
    assert secret not in memory.units


def test_free_memory_holds_nothing_of_a_stored_document() -> None:
    for seed in range(12):
        run_private_trace(seed)


def test_the_engine_forgets_between_steps() -> None:
    core = FakeCore()
    engine = Engine(core, max_queue=1)

    async def forget() -> None:
        await asyncio.wrap_future(engine.forget_documents(["a", "b"]))

    asyncio.run(forget())
    assert core.forgotten == {"a", "b"}
    engine.stop()
    with pytest.raises(EngineDead):
        engine.forget_documents(["c"]).result(5)


def test_a_caller_who_does_not_wait_does_not_end_the_engine() -> None:
    """The result of a cancelled future cannot be set."""
    core = FakeCore()
    engine = Engine(core, max_queue=1)
    engine.forget_documents(["a"]).cancel()
    engine.forget_documents(["b"]).result(5)
    assert core.forgotten == {"a", "b"}
    assert engine.death is None
    engine.stop()
