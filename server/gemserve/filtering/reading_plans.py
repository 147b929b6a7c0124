"""Plans how a server's reader looks at a prompt that another model answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gemserve.config import DEFAULT_KEEP
from gemserve.contract.filter_options import MIN_KEEP, FilterOptions, FilterParams
from gemserve.contract.requests import Request
from gemserve.contract.sampling import SamplingParams
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
        if self.translate is not None:
            num_tokens = len(request.prompt_ids)
            documents = document_ranges(request.protected, request.question, num_tokens)
            translated = self.translate(reading, documents)
            keep = request.filter.keep
            if isinstance(keep, int):
                ratio = _num_free(translated) / max(1, _num_free(request))
                keep = max(MIN_KEEP, round(keep * ratio))
            reading = replace(translated, filter=replace(reading.filter, keep=keep))
        # what the answer will need beside what is kept, for which the reader needs no memory
        beside = request.sampling.max_tokens + request.adapter_positions - 1
        longest = self.planner.longest_sequence - beside
        return replace(self.planner, longest_sequence=longest).planned(reading)


def _num_free(request: Request) -> int:
    """How many tokens a filter chooses from."""
    num_tokens = len(request.prompt_ids)
    return num_tokens - count_always_read(request.protected, num_tokens)
