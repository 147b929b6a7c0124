"""Where a rendered chat shows what: the parts of its messages, what is asked, and calls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import Any

from gemserve.prompting.encoding import IntArray, token_edges
from gemserve.prompting.message_structure import is_result, request_range
from gemserve.prompting.tools import ContentPart, Message, TemplateMessage

Places = Sequence[tuple[int, int, int]]  # (message, start, end) in characters
_LONGEST_VALUE = 200  # characters of an argument that says what a call is about
_MOST_VALUES = 64  # of all arguments; each is looked for in all of the calls


@dataclass(frozen=True, slots=True)
class PlacedPart:
    """A part at characters low..high−1 of the rendered text. `message`: the one it is shown in."""

    part: ContentPart
    message: int
    low: int
    high: int


@dataclass(frozen=True)
class RenderedChat:
    """A chat as text and tokens.

    `messages`: as the template took them. `places`: see `chat_template.find_messages`. `has_tools`:
    whether the answer may call any, or an earlier one did. `is_continued`: the answer goes on with
    the last message.
    """

    messages: Sequence[TemplateMessage]
    places: Places
    text: str
    encoding: Any
    has_tools: bool = False
    is_continued: bool = False

    @cached_property
    def parts(self) -> list[PlacedPart]:
        """The parts that are shown, in the order of the text. Empty: their places are unknown."""
        places = self.places or _found_in_turn(self.messages, self.text)
        return [part for place in places for part in self._parts_at(*place)]

    @cached_property
    def request(self) -> PlacedPart | None:
        """The last user's turn that says more than tagged instructions and is no tool's result.

        If all of them are results, the last one.
        """
        last: PlacedPart | None = None
        for placed in reversed(self.parts):
            is_result = self.is_result(placed)
            if placed.part.role != "user" or placed.part.is_written or (is_result and last):
                continue
            low, high = request_range(self.text[placed.low : placed.high])
            if low < high and not is_result:
                return placed
            if low < high:
                last = placed
        return last

    def is_result(self, placed: PlacedPart) -> bool:
        """Is it what a tool gave, also if that came as a user's turn?"""
        return placed.part.role == "tool" or placed.part.index in self._turns_with_results

    @cached_property
    def _turns_with_results(self) -> frozenset[int]:
        found: dict[int, bool] = {}
        before = ""
        for placed in self.parts:
            text = self.text[placed.low : placed.high]
            if placed.part.role == "assistant":
                before = text
            elif placed.part.role == "user" and placed.part.index not in found:
                found[placed.part.index] = is_result(text, before)
        return frozenset(index for index, is_one in found.items() if is_one)

    @cached_property
    def last_results(self) -> list[PlacedPart]:
        """What the last calls gave, if nobody has said anything since."""
        found: list[PlacedPart] = []
        for placed in reversed(self.parts):
            if not self.is_result(placed):
                break
            found.append(placed)
        return found

    def called(self) -> Iterator[tuple[int, int]]:
        """The characters of what the last calls are about: names of functions, then arguments."""
        results = self.last_results
        if not results:
            return
        end = results[-1].low
        callers = [i for i in range(results[-1].message) if self.messages[i].called]
        if not callers:
            return
        at = low = max((p.high for p in self.parts if p.message < callers[-1]), default=0)
        values = (v for call in self.messages[callers[-1]].called for v in _values(call))
        for value in islice(values, _MOST_VALUES):
            found = self.text.find(value, at, end)
            found = self.text.find(value, low, end) if found < 0 else found
            if found >= 0:
                at = found + len(value)
                yield found, at

    @cached_property
    def _edges(self) -> tuple[IntArray, IntArray]:
        return token_edges(self.encoding)

    def tokens_of(self, placed: PlacedPart) -> tuple[int, int]:
        """The tokens of a part, without those that the template has more than blanks of."""
        start, stop = self.tokens(placed.low, placed.high)
        starts, ends = self._edges
        while start < stop and not self._is_of_part(
            int(starts[start]), placed.low, int(ends[start])
        ):
            start += 1
        while start < stop and not self._is_of_part(
            int(ends[stop - 1]), placed.high, int(starts[stop - 1])
        ):
            stop -= 1
        return start, stop

    def _is_of_part(self, outer: int, border: int, inner: int) -> bool:
        """Does a token from `outer`, perhaps beyond the border, to `inner` belong to the part?"""
        if min(outer, inner) >= border or max(outer, inner) <= border:
            return True
        beyond = self.text[min(outer, border) : max(outer, border)]
        within = self.text[min(inner, border) : max(inner, border)]
        return not beyond.strip() and bool(within.strip())

    def tokens(self, low: int, high: int) -> tuple[int, int]:
        """The tokens that have any of the characters low..high−1."""
        starts, ends = self._edges
        start = int(ends.searchsorted(low, side="right"))
        return start, max(start, int(starts.searchsorted(high)))

    def _parts_at(self, index: int, low: int, high: int) -> Iterator[PlacedPart]:
        parts = self.messages[index].parts
        if len(parts) == 1:
            yield PlacedPart(parts[0], index, low, high)
            return
        found: list[PlacedPart] = []
        at = low
        for part in parts:
            text = part.text.strip()
            start = self.text.find(text, at, high)
            if start < 0:  # the template has rewritten them: they are read whole, as one
                written = ContentPart(
                    self.text[low:high], parts[0].index, parts[0].role, is_written=True
                )
                yield PlacedPart(written, index, low, high)
                return
            at = start + len(text)
            found.append(PlacedPart(part, index, start, at))
        yield from found


def _found_in_turn(messages: Sequence[TemplateMessage], text: str) -> Places:
    """Where the messages' texts stand, one behind the other; nothing if one is not there."""
    places: list[tuple[int, int, int]] = []
    at = 0
    for index, message in enumerate(messages):
        content = message.message["content"].strip()
        start = text.find(content, at)
        if start < 0:
            return []
        at = start + len(content)
        if content:
            places.append((index, start, at))
    return places


def _values(call: Message) -> Iterator[str]:
    """The name of the function, and short values of the arguments."""
    yield call["function"]["name"]
    yield from _leaves(call["function"]["arguments"])


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for member in value.values():
            yield from _leaves(member)
    elif isinstance(value, list):
        for member in value:
            yield from _leaves(member)
    elif isinstance(value, str):
        if 0 < len(value.strip()) <= _LONGEST_VALUE:
            yield value.strip()
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield str(value)
