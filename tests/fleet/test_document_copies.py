"""Which documents the ingress gives to a replica for a request."""

from __future__ import annotations

import asyncio
import json
import time

from gemserve_fleet.replicas.document_copies import _AT_ONCE, DocumentCopies, ids_in
from gemserve_fleet.replicas.ingress import Ingress
from gemserve_fleet.replicas.messages import DocumentCopy
from tests.fakes import Clock

ALICE, BOB = b"alice", b"bob"
ONE, TWO = f"doc-{'1' * 32}", f"doc-{'2' * 32}"
CHAT = "/v1/chat/completions"


def copy_of(document_id: str, left_s: float = 1000) -> DocumentCopy:
    return DocumentCopy(
        id=document_id,
        text="text",
        num_bytes=4,
        num_tokens=1,
        name=None,
        created_s=0,
        expires_s=0,  # for clients: no clock of a host is compared with it
        left_s=left_s,
        is_pinned=False,
        home="r0",
    )


def needed(copies: DocumentCopies, tenant: bytes, path: str, body: bytes = b"") -> list[str]:
    return [*copies.needed(tenant, path, ids_in(body, copies.ids(tenant)))]


def test_a_request_needs_what_it_names_and_only_of_its_own_key() -> None:
    copies = DocumentCopies(Clock())
    copies.add(ALICE, [copy_of(ONE), copy_of(TWO)])
    body = json.dumps({"content": [ONE, ONE, f"doc-{'3' * 32}"]}).encode()
    assert needed(copies, ALICE, CHAT, body) == [ONE]
    assert needed(copies, BOB, CHAT, body) == []
    assert needed(copies, ALICE, CHAT, b"{}") == []


def test_an_id_is_found_however_json_writes_it() -> None:
    copies = DocumentCopies(Clock())
    copies.add(ALICE, [copy_of(ONE)])
    escaped = "".join(f"\\u{ord(character):04X}" for character in ONE)
    assert json.loads(f'"{escaped}"') == ONE
    for written in (escaped, f"\\u0064{ONE[1:]}", ONE.replace("-", "\\u002d")):
        assert needed(copies, ALICE, CHAT, f'{{"id": "{written}"}}'.encode()) == [ONE]


def test_an_id_is_found_across_the_parts_of_a_long_body() -> None:
    escaped = "".join(f"\\u{ord(character):04x}" for character in ONE).encode()
    for place in range(_AT_ONCE - len(escaped) - 1, _AT_ONCE + 2, 5):
        assert ids_in(b" " * place + escaped + b" " * 9, {ONE, TWO}) == [ONE]


def test_a_body_of_escapes_does_not_stop_the_event_loop() -> None:
    """Each was a call of Python, on the event loop of all keys: 64 MiB took 8 s."""
    ingress = Ingress(None, None, None, None)  # type: ignore[arg-type]
    ingress._documents.add(b"", [copy_of(ONE)])
    body = b"\\u0041" * 1_000_000 + ONE.encode()

    async def loop_s() -> float:
        begun_s = time.thread_time()
        assert await ingress._named_documents({"state": {}}, body) == [ONE]
        return time.thread_time() - begun_s

    assert asyncio.run(loop_s()) < 0.1
    begun_s = time.thread_time()
    ids_in(body, {ONE})
    assert time.thread_time() - begun_s < 0.4


def test_lists_and_limits_are_about_all_documents() -> None:
    copies = DocumentCopies(Clock())
    copies.add(ALICE, [copy_of(ONE), copy_of(TWO)])
    for path in ("/v1/documents", f"/v1/documents/{ONE}"):
        assert needed(copies, ALICE, path) == [ONE, TWO]


def test_documents_expire_and_deleted_ones_are_remembered_until_then() -> None:
    clock = Clock()
    copies = DocumentCopies(clock)
    copies.add(ALICE, [copy_of(ONE, 10), copy_of(TWO, 100)])
    copies.remove(ALICE, TWO)
    copies.add(ALICE, [copy_of(TWO, 100)])  # a late message must not bring it back
    assert needed(copies, ALICE, "/v1/documents") == [ONE]
    assert copies.gone(ALICE) == (TWO,)
    clock.now_s += 50
    assert needed(copies, ALICE, "/v1/documents") == []
    assert copies.gone(ALICE) == (TWO,)
    clock.now_s += 50
    assert copies.gone(ALICE) == ()


def test_few_deleted_documents_are_remembered_and_not_for_long() -> None:
    """All ids that a key had deleted within a day went with each of its requests."""
    clock = Clock()
    copies = DocumentCopies(clock)
    for number in range(10_000):
        copies.add(ALICE, [copy_of(f"doc-{number:032x}", 86_400)])
        copies.remove(ALICE, f"doc-{number:032x}")
    assert copies.gone(ALICE) == tuple(f"doc-{number:032x}" for number in range(9744, 10_000))
    clock.now_s += 120
    assert copies.gone(ALICE) == ()


def test_nothing_is_kept_of_a_key_that_never_asks_again() -> None:
    """The texts of its documents stayed in memory."""
    clock = Clock()
    copies = DocumentCopies(clock)
    copies.add(ALICE, [copy_of(ONE, 10), copy_of(TWO, 10)])
    copies.remove(ALICE, TWO)
    clock.now_s += 10
    copies.add(BOB, [copy_of(f"doc-{'3' * 32}")])
    assert len(copies) == 1
    assert ALICE not in copies._copies.keys() | copies._gone.keys()
    copies.remove(BOB, f"doc-{'3' * 32}")
    clock.now_s += 120
    copies.drop_expired()
    assert [copies._copies, copies._ends_s, copies._gone] == [{}, {}, {}]


def test_a_replica_is_told_for_how_long_it_has_a_document() -> None:
    """It compared the time of another host's clock with its own: an hour ahead, all were gone."""
    clock = Clock()
    copies = DocumentCopies(clock)
    copies.add(ALICE, [copy_of(ONE, 100)])
    clock.now_s += 30
    copies.add(ALICE, [copy_of(ONE, 100)])  # an old message does not keep it for longer
    assert [copy.left_s for copy in copies.find(ALICE, [ONE])] == [70]
