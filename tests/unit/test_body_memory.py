"""The memory for bodies is shared between keys."""

from __future__ import annotations

from gemserve.api.access.held_bytes import FREE_BYTES, HeldBytes
from gemserve.holdings import Holdings

MIB = 1 << 20


def body(memory: Holdings, tenant: bytes, mib: int) -> HeldBytes | None:
    held = HeldBytes(memory, tenant)
    return held if held.grow(mib * MIB + FREE_BYTES) else None


def test_one_key_s_bodies_leave_room_for_another_s() -> None:
    """Four slow bodies of one key filled the memory: nobody else could send more than 64 KiB."""
    memory = Holdings(256 * MIB)
    greedy = [body(memory, b"greedy", 64) for _ in range(4)]
    assert [held is not None for held in greedy] == [True, True, True, False]
    other = body(memory, b"other", 64)
    assert other is not None
    assert body(memory, b"third", 1) is None, "there is no more"
    for held in (*greedy, other):
        if held is not None:
            held.release()
            held.release()
    assert memory.used == 0


def test_a_body_of_the_largest_size_can_be_read_alone() -> None:
    memory = Holdings(64 * MIB)
    assert body(memory, b"key", 64) is not None


def test_without_keys_all_share() -> None:
    memory = Holdings(256 * MIB)
    assert all(body(memory, b"", 64) is not None for _ in range(4))
