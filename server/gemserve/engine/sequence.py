"""One request's progress through the engine: plain state, no torch."""

from __future__ import annotations

from collections.abc import Sequence as Ids
from dataclasses import dataclass, field
from enum import Enum

from gemserve.engine.memory import Span
from gemserve.types import Request


class State(Enum):
    WAITING = "waiting"
    FILTERING = "filtering"
    PREFILLING = "prefilling"
    DECODING = "decoding"
    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class Sequence:
    """A request and how far it has come.

    `filter_layer` None: the whole prompt is read. `num_kept`: tokens the answer is generated from.
    `done`: tokens of the current pass (filter or prefill) already run. `ids`: what the current or
    next full pass reads, known once the filter has chosen.
    """

    request: Request
    filter_layer: int | None
    num_kept: int
    order: int
    state: State = State.WAITING
    done: int = 0
    ids: Ids[int] = ()
    generated: list[int] = field(default_factory=list)
    span: Span | None = None
    times_passed: int = 0  # requests behind this one that were admitted before it

    @property
    def num_prompt(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def max_length(self) -> int:
        """Positions that generation may need keys and values for."""
        return self.num_kept + self.request.sampling.max_tokens

    @property
    def pass_length(self) -> int:
        """Tokens of the current pass."""
        return self.num_prompt if self.state is State.FILTERING else self.num_kept

    @property
    def remaining(self) -> int:
        """Tokens of the current pass not yet run."""
        return self.pass_length - self.done

    @property
    def next_position(self) -> int:
        """Where the newest generated token stands; its keys and values are not yet computed."""
        return self.num_kept + len(self.generated) - 1

    def filter_units(self) -> int:
        """Memory of the filter pass: K and V below the filter layer, and that layer's keys."""
        if self.filter_layer is None:
            return 0
        return self.num_prompt * (2 * self.filter_layer + 1)

    def kept_units(self, num_layers: int) -> int:
        """Memory of generation: K and V of all layers."""
        return 2 * num_layers * self.max_length

    def peak_units(self, num_layers: int) -> int:
        """What admission reserves: generation reuses the filter pass's memory."""
        return max(self.filter_units(), self.kept_units(num_layers))
