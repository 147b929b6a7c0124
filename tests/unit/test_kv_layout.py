"""Where layers with a sliding window have their tokens: what is needed is there, and no more."""

from __future__ import annotations

from random import Random

import pytest

from gemserve.kv_layout import END_TOKENS, LOOK_TOKENS, KVLayout, Piece, WindowRoom

GEMMA = KVLayout(growing=4, windowed=22, window=512)


class FakeSequence:
    """The tokens in one windowed layer, which writes what its room says."""

    def __init__(self, room: WindowRoom) -> None:
        self.room, self.count = room, 0
        self.recent: list[int | None] = [None] * room.recent
        self.saved: list[int | None] = [None] * room.num_saved

    def write(self, count: int, value: int = 0) -> None:
        """`count` more tokens; what each writes is its position times 10, and `value`."""
        start, stop = self.count, self.count + count
        before, first = self.room.first(start), self.room.first(stop)
        held = {t: self.recent[t - before] for t in range(before, start)}
        written = {t: 10 * t + value for t in range(start, stop)}
        for t in range(first, stop):
            self.recent[t - first] = {**held, **written}[t]
        for some in () if self.room.has_all else self.room.saved:
            for t in range(max(start, some.first), min(stop, some.stop)):
                self.saved[some.at + t - some.first] = written[t]
        self.count = stop

    def seen(self, count: int) -> list[int | None]:
        """The last `count` tokens."""
        first = self.room.first(self.count)
        start = max(0, self.count - count)
        assert start >= first, "they are gone"
        return self.recent[start - first : self.count - first]

    def piece(self, piece: Piece) -> list[int | None]:
        area = self.recent if piece.is_recent else self.saved
        return area[piece.slot : piece.slot + piece.num_tokens]

    def put(self, piece: Piece, tokens: list[int | None]) -> None:
        area = self.recent if piece.is_recent else self.saved
        assert len(tokens) == piece.num_tokens
        area[piece.slot : piece.slot + piece.num_tokens] = tokens


def room_of(layout: KVLayout, *arguments: object) -> WindowRoom:
    room = layout.room(*arguments)  # type: ignore[arg-type]
    assert room is not None
    return room


def test_a_long_sequence_holds_little_more_than_windows() -> None:
    """Each layer held the whole length: 832 MiB for 32,768 tokens of a Gemma 3 1B."""
    unit = 256 * 2  # bytes: one key head of 256 numbers
    held = GEMMA.units(32768, GEMMA.room(32768)) * unit / 2**20
    assert held == pytest.approx(142.1, abs=0.1)
    assert GEMMA.units(32768, GEMMA.room_for_all(32768)) * unit / 2**20 == 832


def test_a_short_sequence_has_room_for_all() -> None:
    assert room_of(GEMMA, 600).has_all
    assert GEMMA.units(600, GEMMA.room(600)) == 2 * 26 * 600
    assert KVLayout(growing=4).room(10**6) is None


@pytest.mark.parametrize("window", [1, 5, 72, 200])
def test_every_token_finds_its_window(window: int) -> None:
    """Chunks of any length, shorter and longer than the window, and single tokens."""
    layout, rng = KVLayout(growing=1, windowed=1, window=window), Random(window)
    for _ in range(3):
        sequence = FakeSequence(room_of(layout, 3000))
        assert not sequence.room.has_all
        while sequence.count < 2500:
            sequence.write(min(rng.choice((1, 1, 7, window, 300)), 3000 - sequence.count))
            seen = sequence.seen(window + LOOK_TOKENS)
            assert seen == [10 * t for t in range(sequence.count - len(seen), sequence.count)]


@pytest.mark.parametrize("window", [5, 72])
def test_what_goes_on_from_another_prompt_finds_its_window(window: int) -> None:
    """Also when that one goes on from a third one, and what it could not save is not found."""
    rng = Random(window)
    layout = KVLayout(growing=1, windowed=1, window=window, saves=True)
    num_going_on = 0
    for _ in range(25):
        sizes = [rng.randrange(300, 3000) for _ in range(3)]
        sequence: FakeSequence | None = None
        for size in sizes:
            boundaries = (rng.randrange(256, size),) if rng.random() < 0.5 else ()
            planned = room_of(layout, size + 140, size, boundaries)
            source, sequence = sequence, FakeSequence(planned)
            if source is not None:
                count = source.room.usable(rng.randrange(1, min(size, source.count - 140)))
                if count:
                    num_going_on += 1
                    sequence.room, copies = planned.going_on_from(source.room, count)
                    sequence.count = count
                    for of, into in copies:
                        sequence.put(into, source.piece(of))
                    assert sequence.seen(window) == [
                        10 * t for t in range(max(0, count - window), count)
                    ]
            sequence.write(size - sequence.count)
            for _ in range(140):  # its answer
                sequence.write(1, value=1)
            left = sequence.room.left(size)
            for some in left.saved:
                kept = sequence.piece(Piece(left.has_all, some.at, some.stop - some.first))
                assert kept == [10 * t for t in range(some.first, some.stop)]
    assert num_going_on > 30


def test_a_shorter_beginning_finds_at_least_half_of_it() -> None:
    layout = KVLayout(growing=1, windowed=1, window=72, saves=True)
    room = room_of(layout, 20_000, 19_000, (7000,))
    assert not room.has_all
    for count in range(1, 19_000, 37):
        assert count / 2 < room.usable(count) <= count
    assert [room.usable(count) for count in (6999, 7000, 7100)] == [4608, 7000, 7000]
    assert room.usable(19_000 - END_TOKENS) == 19_000 - END_TOKENS
    assert room.usable(19_000 - END_TOKENS - 1) == 18_432


def test_nothing_is_saved_for_nobody() -> None:
    """Without a document cache no prompt goes on from another one."""
    without = KVLayout(growing=1, windowed=1, window=72)
    assert room_of(without, 20_000, 19_000).num_saved == 0
    assert room_of(KVLayout(growing=1, windowed=1, window=72, saves=True), 20_000).num_saved == 0


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("growing", [0, 1, 4])
def test_the_longest_sequence_fits_with_any_boundary(growing: int, saves: bool) -> None:
    """One that the planner allows and that never fits would wait forever."""
    layout = KVLayout(growing=growing, windowed=5, window=72, saves=saves)
    for num_units in range(100, 60_000, 4731):
        longest = layout.longest(num_units, 5000)
        for boundary in (1, 300, 1000, longest - 1):
            room = layout.room(longest, longest, (boundary,))
            assert layout.units(longest, room) <= num_units
        if longest < 5000 and not saves:
            more = layout.room(longest + 1, longest + 1)
            assert layout.units(longest + 1, more) > num_units
