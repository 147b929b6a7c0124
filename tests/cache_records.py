"""What a random trace over the document cache remembers of requests and passes."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from gemserve.types import Event, Filtered, Finished, Request, TextDelta

Answer = tuple[Any, ...]
Key = tuple[Any, ...]


@dataclass(slots=True)
class Outcome:
    """What happened in a trace. `left_out`: tokens that passes took over from the cache.

    `whole_hits`: prompts that were read whole but for what they took over.
    """

    answers: int = 0
    hits: int = 0
    evictions: int = 0
    cancelled: int = 0
    forgotten: int = 0
    wiped: int = 0
    restarts: int = 0
    disk_hits: int = 0
    damaged: int = 0
    left_out: int = 0
    whole_hits: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """Tokens that prompts begin with. `number`: which stored document they begin with."""

    ids: list[int]
    number: int


@dataclass(frozen=True, slots=True)
class Pass:
    """A pass that has ended, and may be in the cache until a document in it is forgotten."""

    key: Key
    tokens: Any
    documents: frozenset[str]


@dataclass(slots=True)
class Asked:
    """A request in flight, and its events so far.

    `had`: passes that were forgotten after it was admitted, so it may have taken over their tokens.
    """

    request: Request
    key: Key
    number: int
    events: list[Event] = field(default_factory=list)
    had: list[Pass] = field(default_factory=list)


def answer_of(events: list[Event]) -> Answer:
    """What must not depend on a cache: what was kept and why, and the tokens of the answer."""
    (report,) = (event.report for event in events if isinstance(event, Filtered))
    last = events[-1]
    assert isinstance(last, Finished)
    assert last.reason != "error", last.error
    tokens = [t for event in events if isinstance(event, TextDelta) for t in event.token_ids]
    return report.reason, report.kept_tokens, report.selection, last.reason, tuple(tokens)
