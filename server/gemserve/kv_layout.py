"""Where the layers' keys and values of one sequence are in its memory. No torch.

A layer with a sliding window needs the keys and values of its last tokens only. So a sequence has
room for all of its tokens in the layers that grow, and room for a window and a little more in the
others:

    growing layers, all tokens | windowed layers, saved ranges | windowed layers, recent tokens

The room for recent tokens is in one piece, as attention reads it. When it is full, the last window
moves to its start. What has left it is gone, so a pass that begins like this one could go on
nowhere. Where another prompt may begin like it, some ranges of the prompt are saved beside: a
window before each of a few tokens, and the prompt's end.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

FEWEST_STEP = 32  # tokens by which the recent ones move on, at least
LOOK_TOKENS = 16  # newest tokens before each of which a whole window is there: see `AnswerWatch`
END_TOKENS = 256  # at a prompt's end, behind any of which another prompt may go on
_ALL = 1 << 62  # more tokens than any sequence has


class Saved(NamedTuple):
    """Tokens first..stop−1, from the slot `at` of the room for saved tokens on."""

    first: int
    stop: int
    at: int


class Piece(NamedTuple):
    """So many tokens from `slot` on, in the room for recent tokens or in that for saved ones."""

    is_recent: bool
    slot: int
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowRoom:
    """What one sequence has in each windowed layer, in tokens.

    `recent`: the room for its newest tokens, which move on by `step` tokens when it is full; 0: it
    has room for all. `saved`: the ranges that are kept as well, in room for `num_saved` tokens. If
    there is room for all, they are in that: those that have been there from the beginning on, or
    from where the sequence has gone on.
    """

    window: int
    recent: int
    step: int = 0
    saved: tuple[Saved, ...] = (Saved(0, _ALL, 0),)
    num_saved: int = 0

    @property
    def has_all(self) -> bool:
        """Is there room for all tokens?"""
        return self.step == 0

    @property
    def capacity(self) -> int:
        return self.num_saved + self.recent

    def first(self, num_tokens: int) -> int:
        """The token at the first slot of the recent ones, when the sequence has `num_tokens`."""
        if num_tokens <= self.recent:
            return 0
        assert self.step, "room for all tokens is not enough for them"
        return -(-(num_tokens - self.recent) // self.step) * self.step

    def usable(self, count: int) -> int:
        """The most of the first `count` tokens behind which another pass may go on."""
        return max((self._usable_of(saved, count) for saved in self.saved), default=0)

    def _usable_of(self, saved: Saved, count: int) -> int:
        stop = min(count, saved.stop)
        has_window = saved.first == 0 or stop - self.window >= saved.first
        return stop if has_window else 0

    def _find(self, first: int, stop: int) -> tuple[int, Piece] | None:
        """Where the last of the tokens first..stop−1 are, and which is the first of these."""
        for saved in self.saved:
            if saved.first < stop <= saved.stop:
                start = max(first, saved.first)
                return start, Piece(self.has_all, saved.at + start - saved.first, stop - start)
        return None

    def going_on_from(
        self, source: WindowRoom, count: int
    ) -> tuple[WindowRoom, list[tuple[Piece, Piece]]]:
        """This room of a sequence that takes its first `count` tokens over from another room.

        Also returns which pieces of `source` are to be copied to which of its own. `count` is
        usable there. What `source` no longer has is not among the saved tokens of the result.
        """
        found = source._find(self.first(count), count)
        assert found is not None, "no window is kept there"
        start, piece = found
        copies = [(piece, Piece(True, start - self.first(count), piece.num_tokens))]
        if self.has_all:
            return replace(self, saved=(Saved(start, _ALL, start),)), copies
        saved: list[Saved] = []
        for planned in self.saved:
            stop = min(planned.stop, count)
            found = source._find(planned.first, stop) if planned.first < stop else None
            start = max(planned.first, count) if found is None else found[0]
            slot = planned.at + start - planned.first
            if start < planned.stop:
                saved.append(Saved(start, planned.stop, slot))
            if found is not None:
                copies.append((found[1], Piece(False, slot, found[1].num_tokens)))
        return replace(self, saved=tuple(saved)), copies

    def left(self, num_tokens: int) -> WindowRoom:
        """The room of a prompt of `num_tokens` that is kept when its sequence has ended.

        Of the recent tokens nothing stays, unless they are all there.
        """
        saved = tuple(
            Saved(some.first, min(some.stop, num_tokens), some.at)
            for some in self.saved
            if some.first < num_tokens
        )
        return replace(self, saved=saved, recent=num_tokens if self.has_all else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """How many layers with keys and values grow, and how many have a window.

    `window`: the most tokens that any of the latter sees. `saves`: are ranges saved, so that other
    prompts can go on from them?
    """

    growing: int
    windowed: int = 0
    window: int = 0
    saves: bool = False

    @property
    def num_layers(self) -> int:
        """How many layers have keys and values."""
        return self.growing + self.windowed

    def room_for_all(self, capacity: int) -> WindowRoom | None:
        """The room of a sequence that keeps all tokens in all layers. None: no layer has a
        window.
        """
        return WindowRoom(window=self.window, recent=capacity) if self.windowed else None

    def room(
        self, capacity: int, num_prompt: int = 0, boundaries: Sequence[int] = ()
    ) -> WindowRoom | None:
        """The room of a sequence of at most `capacity` tokens. None: no layer has a window.

        `num_prompt`: how many tokens at its beginning another prompt may begin with; `boundaries`:
        behind which tokens this is likely.
        """
        if not self.windowed:
            return None
        saved: tuple[Saved, ...] = ()
        if self.saves and num_prompt:
            saved = _saved(self.window, num_prompt, tuple(boundaries))
        step = max(FEWEST_STEP, self.window // 4)
        num_saved = sum(some.stop - some.first for some in saved)
        recent = self.window + LOOK_TOKENS + step
        if recent + num_saved >= capacity:
            return self.room_for_all(capacity)
        return WindowRoom(
            window=self.window, recent=recent, step=step, saved=saved, num_saved=num_saved
        )

    def units(self, capacity: int, room: WindowRoom | None) -> int:
        """Units of memory of a sequence with room for `capacity` tokens in the growing layers."""
        of_windows = 0 if room is None else self.windowed * room.capacity
        return 2 * (self.growing * capacity + of_windows)

    def left_units(self, num_prompt: int) -> int:
        """Units of what is kept of a prompt that was read whole."""
        room = self.room(num_prompt + 1, num_prompt)
        return self.units(num_prompt, None if room is None else room.left(num_prompt))

    def longest(self, num_units: int, most: int) -> int:
        """The longest sequence that fits into `num_units`, at most `most` tokens."""
        low, high = 0, most
        while low < high:
            middle = (low + high + 1) // 2
            room = self.room(middle, middle)
            needed = self.units(middle, room)
            if room is not None and self.saves and not room.has_all:
                # a further boundary may be saved
                needed += 2 * self.windowed * self.window
            if needed <= num_units:
                low = middle
            else:
                high = middle - 1
        return low


@lru_cache(maxsize=1024)
def _saved(window: int, num_prompt: int, boundaries: tuple[int, ...]) -> tuple[Saved, ...]:
    """The ranges to save: before the window's multiples by powers of two, and at the end.

    So whoever has a shorter beginning in common finds at least half of it.
    """
    ranges = [(stop - window, stop) for stop in _powers(window, num_prompt)]
    ranges += [(stop - window, stop) for stop in boundaries if stop < num_prompt]
    ranges.append((num_prompt - window - END_TOKENS, num_prompt))
    joined: list[tuple[int, int]] = []
    for first, stop in sorted((max(0, first), stop) for first, stop in ranges):
        if joined and first <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(stop, joined[-1][1])
        else:
            joined.append((first, stop))
    at, saved = 0, []
    for first, stop in joined:
        saved.append(Saved(first, stop, at))
        at += stop - first
    return tuple(saved)


def _powers(window: int, most: int) -> Iterator[int]:
    while window <= most:
        yield window
        window *= 2
