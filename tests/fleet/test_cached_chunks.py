"""What a replica says of its cache, from what the engine notes, and what the router makes of it."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from gemserve.contract.reading_notes import CacheEntry, HeldPart, ReadingNotes
from gemserve.contract.requests import Request
from gemserve.engine.cache.document_cache import CacheKey, DocumentCache
from gemserve.engine.memory import MemoryPool, MemoryShare
from gemserve_fleet.replicas.cached_chunks import CachedChunks, split_keys
from gemserve_fleet.replicas.replica_choice import RoutingHints, by_cost, route_of
from gemserve_fleet.replicas.replica_reports import QueueReport, ReplicaReports, report_of
from gemserve_fleet.replicas.routing import ModelReading, TokenCosts
from gemserve_fleet.replicas.text_chunks import TextChunk, chunk_salt, text_chunks
from tests.fakes import CHAT, FakeCore
from tests.fleet.in_process import fleet_of

WHOLE = ModelReading(reading="whole", costs=TokenCosts(full=1.0, answered=1.0))


class HoldingCore(FakeCore):
    """It says at once that the document cache holds the whole prompt."""

    def add(self, request: Request) -> Any:
        assert request.notes is not None
        request.notes.held.append(HeldPart(CacheEntry(), 0.0, 1.0))
        return super().add(request)


def chunks_of(name: str, num_chunks: int = 4) -> tuple[TextChunk, ...]:
    return tuple(
        TextChunk(f"{name}{index}".encode().ljust(16), 1_000) for index in range(num_chunks)
    )


def keys_of(chunks: tuple[TextChunk, ...]) -> list[bytes]:
    return [chunk.key for chunk in chunks]


def test_a_chunk_is_held_with_the_part_that_its_middle_is_in() -> None:
    cached, notes, chunks = CachedChunks(), ReadingNotes(), chunks_of("a")
    cached.watch(notes, chunks)
    assert cached.keys() == b""
    notes.held.append(HeldPart(CacheEntry(), 0.0, 0.4))  # two middles: 1/8 and 3/8
    assert split_keys(cached.keys()) == keys_of(chunks[:2])
    notes.held.append(HeldPart(CacheEntry(), 0.4, 1.0))
    assert split_keys(cached.keys()) == keys_of(chunks)


def test_what_the_cache_drops_is_no_longer_said() -> None:
    cached, notes, chunks = CachedChunks(), ReadingNotes(), chunks_of("a")
    first, second = CacheEntry(), CacheEntry()
    cached.watch(notes, chunks)
    notes.held += [HeldPart(first, 0.0, 0.5), HeldPart(second, 0.5, 1.0)]
    cached.end(notes)
    cached.end(notes)
    first.is_dropped = True
    assert split_keys(cached.keys()) == keys_of(chunks[2:])
    again = ReadingNotes()  # another question, for which the cache holds all in one entry
    cached.watch(again, chunks)
    again.held.append(HeldPart(CacheEntry(), 0.0, 1.0))
    cached.end(again)
    second.is_dropped = True
    assert sorted(split_keys(cached.keys())) == keys_of(chunks)


def test_a_miss_and_a_text_without_chunks_say_nothing() -> None:
    cached, notes = CachedChunks(), ReadingNotes()
    cached.watch(notes, ())
    notes.held.append(HeldPart(CacheEntry(), 0.0, 1.0))
    cached.end(notes)
    assert cached.keys() == b""


def test_the_list_is_bounded_and_keeps_what_was_noted_last() -> None:
    cached = CachedChunks(most_keys=4)
    for name in "abc":
        notes = ReadingNotes(held=[HeldPart(CacheEntry(), 0.0, 1.0)])
        cached.watch(notes, chunks_of(name, 2))
        cached.end(notes)
    assert split_keys(cached.keys()) == keys_of(chunks_of("b", 2) + chunks_of("c", 2))


def test_an_entry_outlives_its_document() -> None:
    pool = MemoryPool(8_000)
    cache = DocumentCache(pool, 8_000)
    tokens = np.arange(300)
    span = pool.allocate(600)
    assert span is not None
    key = CacheKey(b"", None, 1)
    cache.add(key, tokens, (MemoryShare(span, 300, 300),))
    (document,) = cache.documents
    entry = document.entry
    assert not entry.is_dropped
    cache.make_room(8_000)
    assert entry.is_dropped


def report(number: int, cached: tuple[TextChunk, ...], **fields: Any) -> dict[str, Any]:
    given = {"queued_tokens": 0, "last_received": 0, "model": WHOLE, **fields}
    return report_of(number, cached=b"".join(keys_of(cached)), **given)


def reports_of(*names: str) -> ReplicaReports:
    reports = ReplicaReports()
    reports.set_replicas(names)
    return reports


def test_reports_say_where_a_text_is_until_it_is_evicted() -> None:
    """A list replaces the earlier one, so a report that is left out does no harm."""
    reports, chunks = reports_of("x", "y"), chunks_of("a")
    hints = RoutingHints(chunks=chunks)
    reports.take("x", report(1, (), queued_tokens=0))
    reports.take("y", report(1, chunks, queued_tokens=3_000))
    assert by_cost(hints, reports.states())[0] == "y"
    reports.take("y", report(5, chunks[2:], queued_tokens=1_900))
    assert by_cost(hints, reports.states())[0] == "x"  # prompts are cached from their beginning
    assert {state.model for state in reports.states()} == {WHOLE}


def test_a_report_is_taken_once() -> None:
    """The router sees the latest one at each choice. It must not count what was sent away."""
    reports, chunks = reports_of("x"), chunks_of("a")
    route = route_to_x(chunks)
    reports.take("x", report(1, ()))
    reports.sent(route, 7)
    for _ in range(9):
        reports.take("x", report(1, ()))
    assert reports.states()[0].queued_tokens == 4_000
    reports.take("x", report(2, (), queued_tokens=10, last_received=6))
    assert reports.states()[0].queued_tokens == 4_010
    reports.take("x", report(3, (), queued_tokens=4_000, last_received=7))
    assert reports.states()[0].queued_tokens == 4_000


def test_an_answer_tells_what_is_left_in_the_queue() -> None:
    """A client's next question comes at once, before the next periodic report."""
    reports, chunks = reports_of("x"), chunks_of("a")

    def tell(number: int, queued_tokens: int, last_received: int) -> float:
        reports.take_queue(
            QueueReport(
                replica="x",
                number=number,
                queued_tokens=queued_tokens,
                last_received=last_received,
            )
        )
        return reports.states()[0].queued_tokens

    reports.take("x", report(1, ()))
    reports.sent(route_to_x(chunks), 7)
    reports.take("x", report(2, (), queued_tokens=3_500, last_received=7))
    assert tell(3, 0, 7) == 0
    assert tell(2, 9_000, 7) == 0  # an earlier one
    reports.take("x", report(2, chunks, queued_tokens=3_500, last_received=7))
    assert tell(4, 20, 7) == 20
    # what is on its way is not lost, however many short answers end meanwhile
    reports.sent(route_to_x(chunks), 9)
    assert [tell(5 + each, 0, 8) for each in range(9)] == [4_000] * 9


def route_to_x(chunks: tuple[TextChunk, ...]) -> Any:
    states = reports_of("x").states()
    return route_of(RoutingHints(chunks=chunks), states[0], states)


def test_a_replica_that_is_replaced_has_nothing() -> None:
    """Its successor has another name, and an empty cache."""
    reports, chunks = reports_of("x", "y"), chunks_of("a")
    reports.take("x", report(9, chunks))
    reports.set_replicas(["y", "z"])
    reports.take("x", report(10, chunks))
    assert not any(chunk.key in each.cached for each in reports.states() for chunk in chunks)
    reports.take("z", {})  # it has not reported yet
    assert [state.queued_tokens for state in reports.states()] == [0, 0]


def test_a_hot_document_is_bounded_by_load() -> None:
    """One replica has it. It gets its questions until a second one had better read it, too."""
    reports, chunks = reports_of("x", "y"), chunks_of("hot", 20)
    reports.take("x", report(1, chunks))
    chosen = []
    for number in range(1, 700):
        hints = RoutingHints(number=number, chunks=chunks, answer_tokens=100)
        states = reports.states()
        name = by_cost(hints, states)[0]
        state = next(state for state in states if state.name == name)
        reports.sent(route_of(hints, state, states), number)
        chosen.append(name)
    assert set(chosen[:300]) == {"x"}
    assert 1 <= chosen.count("y") < 300


@pytest.mark.anyio
async def test_text_and_replies_lead_to_the_replica_that_has_it(tokenizer: Any) -> None:
    """The whole way but for Ray, with an engine that says what it holds."""
    text = "".join(f"Line {number} is about number {number * 7}. " for number in range(2_000))
    long = {"max_prompt_tokens": 100_000, "context_tokens": 200_000}
    async with fleet_of(tokenizer, HoldingCore(), HoldingCore(), **long) as fleet:

        async def ask(question: str) -> str:
            body = {"messages": [{"role": "user", "content": text + question}]}
            before = {name: len(each.core.requests) for name, each in fleet.replicas.all.items()}
            reply = await fleet.client.post(CHAT, json={"model": "fake", **body})
            assert reply.status_code == 200, reply.text
            (name,) = (
                name
                for name, each in fleet.replicas.all.items()
                if len(each.core.requests) > before[name]
            )
            return name

        first = await ask("One?")
        other = "r1" if first == "r0" else "r0"
        fleet[first].load = 3_000
        assert await ask("Two?") == first
        fleet[first].load = 300_000
        assert await ask("Three?") == other


def test_a_salt_is_of_a_tenant_and_a_model() -> None:
    secret, text = b"s" * 32, "word " * 3_000
    salts = {chunk_salt(secret, *names) for names in (("a", "m"), ("b", "m"), ("a", "n"))}
    keys = [chunk.key for salt in salts for chunk in text_chunks(text, salt)]
    assert len(set(keys)) == len(keys)
