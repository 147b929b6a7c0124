"""A request while the engine serves it."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

from gemserve.contract.events import Event
from gemserve.contract.filter_plan import FilterReason
from gemserve.contract.requests import Request
from gemserve.decoding.detokenize import TextStream
from gemserve.engine.sequence.sequence import LiveSequence


@dataclass(slots=True, eq=False, repr=False)
class Job:
    """A request with its place in the schedule and its text.

    `reason` says why its prompt is not filtered, or why more of it is kept than the request wants.
    `added_s` is the time of its arrival and `started_s` that of its first step
    (`time.monotonic()`); up to `led_s` another's pass read what it begins with, or the disk, which
    was asked last at `asked_s`. `num_proposed`: tokens that were tried behind its newest ones;
    `num_accepted` of them were drawn.
    """

    request: Request
    sequence: LiveSequence
    text: TextStream
    reason: FilterReason | None
    added_s: float = field(default_factory=time.monotonic)
    started_s: float | None = None
    led_s: float = -math.inf
    asked_s: float = -math.inf
    num_proposed: int = 0
    num_accepted: int = 0


Emitted = list[tuple[Job, Event]]
