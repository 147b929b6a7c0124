"""What all ranks must agree on after a step, although only rank 0's results are used."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from gemserve.engine.sequence.step_plan import RunOutput


@dataclass(frozen=True, slots=True)
class StepSummary:
    """How far the passes have come. `kept`: sequences whose filters have chosen.

    `retried`: what was done once more for each sequence alone; `failures` of sequences.
    """

    is_chunk_done: bool
    kept: tuple[int, ...]
    evicted: tuple[int, ...]
    retried: tuple[tuple[str, str], ...]
    failures: Mapping[int, str]

    def fits(self, leader: StepSummary) -> bool:
        """Whether this rank has done what rank 0 has done.

        A sequence may fail on rank 0 alone, when a token is drawn, and is then forgotten by all.
        """
        same = ("is_chunk_done", "kept", "evicted", "retried")
        return self.failures.items() <= leader.failures.items() and all(
            getattr(self, name) == getattr(leader, name) for name in same
        )


def summary_of(out: RunOutput) -> StepSummary:
    return StepSummary(
        is_chunk_done=out.is_chunk_done,
        kept=tuple(out.kept),
        evicted=tuple(out.evicted),
        # only rank 0 draws
        retried=tuple(one for one in out.retried if one[0] != "draw_batch"),
        failures=dict(out.failures),
    )
