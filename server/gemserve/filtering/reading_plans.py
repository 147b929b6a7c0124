"""Plans how a server's reader looks at a prompt that another model answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gemserve.config import DEFAULT_KEEP
from gemserve.contract.filter_options import MIN_KEEP, FilterOptions, FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
from gemserve.errors import RequestError
from gemserve.filtering.protected_budget import count_always_read
from gemserve.filtering.segment_cuts import document_ranges

if TYPE_CHECKING:
    from gemserve.calibration.files import Calibration
    from gemserve.filtering.planner import FilterPlanner

Translate = Callable[[Request, Sequence[tuple[int, int]]], Request]


def paired(reader: Calibration, answering: Calibration) -> Calibration:
    """The reader's calibration, with how much `keep` "auto" keeps for the model that answers.

    If that was measured, it is more than that model keeps for itself, unless more distracts it: a
    smaller model finds less in as many tokens, and saves more time than they take (docs/reader.md).
    """
    if answering.auto_keep is None:
        return reader
    most, distracts = answering.auto_keep, answering.more_distracts
    most = most if distracts else max(most, DEFAULT_KEEP)
    return replace(reader, auto_keep=most, more_distracts=distracts)


@dataclass(frozen=True, slots=True)
class ReaderPlans:
    """The planner of the reader, for prompts that another model answers.

    `translate`: gives a request the reader's tokens, of which its documents are to be looked at;
    None: both models have the same.
    """

    planner: FilterPlanner
    translate: Translate | None

    @staticmethod
    def of(
        reader: FilterPlanner,
        answering: FilterPlanner,
        translate: Translate | None,
    ) -> ReaderPlans:
        planner = replace(
            reader,
            calibration=paired(reader.calibration, answering.calibration),
            keep=answering.keep,
            longest_sequence=answering.longest_sequence,
            is_reader=True,
        )
        return ReaderPlans(planner, translate)

    def params(self, options: FilterOptions) -> FilterParams:
        """Raises `RequestError` for options that the reader does not have."""
        params = self.planner.resolve(replace(options, reader="self"))
        return replace(params, reader="reader", may_read_whole=False)

    def request(self, request: Request) -> Request:
        """What the reader does for a request, with its plan: it ends when it has chosen.

        Raises `RequestError`.
        """
        reading = replace(
            request,
            selects_only=True,
            sampling=SamplingParams(max_tokens=1),
            filter=replace(request.filter, return_attention=False),
            prompt_logprobs=None,
            grammar=None,
            adapter=None,
        )
        # what the answer will need beside what is kept, for which the reader needs no memory
        beside = request.sampling.max_tokens + request.adapter_positions - 1
        longest = self.planner.longest_sequence - beside
        planner = replace(self.planner, longest_sequence=longest)
        if self.translate is None:
            return planner.planned(reading)
        num_tokens = len(request.prompt_ids)
        documents = document_ranges(request.protected, request.question, num_tokens)
        translated = self.translate(reading, documents)
        keep, free, of_reader = request.filter.keep, _num_free(request), _num_free(translated)
        if isinstance(keep, int):
            keep = max(MIN_KEEP, round(keep * of_reader / max(1, free)))
        reading = replace(translated, filter=replace(reading.filter, keep=keep))
        # The reader's prompt has the documents alone: everything fits there if it does here.
        room = (longest - 1 - (num_tokens - free)) * of_reader // max(1, free)
        planner = replace(planner, longest_sequence=1 + _num_firm(translated) + room)
        if num_tokens < longest:
            return planner.planned(reading)
        reading = replace(planner, min_tokens=0).planned(reading)
        assert reading.plan is not None
        if reading.plan.reason is not None:
            raise RequestError(
                f"filter.reader=reader: the prompt of {num_tokens} tokens must be filtered, and "
                f"its documents have {of_reader} of the reader's tokens, too few to choose from; "
                "filter.reader=self has the model itself look",
                param="filter.reader",
            )
        return reading


def _num_free(request: Request) -> int:
    """How many tokens a filter chooses from."""
    return len(request.prompt_ids) - _num_firm(request)


def _num_firm(request: Request) -> int:
    """How many tokens are always read."""
    return count_always_read(request.protected, len(request.prompt_ids))
