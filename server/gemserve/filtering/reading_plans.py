"""Plans how a server's reader looks at a prompt that another model answers."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gemserve.filter_plan import FilterPlan
from gemserve.types import FilterOptions, FilterParams, Request, SamplingParams

if TYPE_CHECKING:
    from gemserve.filtering.planner import FilterPlanner


@dataclass(frozen=True, slots=True)
class ReaderPlans:
    """The planner of the reader, for prompts that another model answers.

    How much is kept is what that model answers best from, if this was measured.
    """

    planner: FilterPlanner

    @staticmethod
    def of(reader: FilterPlanner, answering: FilterPlanner) -> ReaderPlans:
        calibration = reader.calibration
        if answering.calibration.auto_keep is not None:
            calibration = replace(
                calibration,
                auto_keep=answering.calibration.auto_keep,
                more_distracts=answering.calibration.more_distracts,
            )
        return ReaderPlans(
            replace(
                reader,
                calibration=calibration,
                keep=answering.keep,
                longest_sequence=answering.longest_sequence,
            )
        )

    def params(self, options: FilterOptions) -> FilterParams:
        """Raises `RequestError` for options that the reader does not have."""
        params = self.planner.resolve(replace(options, reader="self"))
        return replace(params, reader="reader", may_read_whole=False)

    def plan(self, request: Request) -> FilterPlan:
        """How the reader looks at a request's prompt."""
        return self.planner.plan(for_reader(request, None))


def for_reader(request: Request, plan: FilterPlan | None) -> Request:
    """What the reader does for a request, by its own `plan`: it ends when it has chosen."""
    return replace(
        request,
        selects_only=True,
        sampling=SamplingParams(max_tokens=request.sampling.max_tokens),
        filter=replace(request.filter, return_attention=False),
        prompt_logprobs=None,
        grammar=None,
        adapter=None,
        plan=plan,
    )
