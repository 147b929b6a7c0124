"""Reads the best passages of a prompt again, each alone and by all layers, before any is kept."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gemserve.model.adapter import Adapter
from gemserve.model.attention import Breaks
from gemserve.model.causal_model import CausalModel
from gemserve.types import Request


class SecondLook:
    """A pass over passages. `likelihoods`: the question's behind each so far, above 0 up to 1."""

    def __init__(
        self,
        request: Request,
        passages: Sequence[tuple[int, int]],
        model: CausalModel,
        adapter: Adapter,
    ) -> None:
        self._request, self._passages = request, passages
        self._model, self._adapter = model, adapter
        self.likelihoods: list[float] = []

    def forward(self, breaks: Breaks) -> None:
        """Read one passage after the other."""
        assert self._request.plan is not None
        look = self._request.plan.look
        assert look is not None
        for start, stop in self._passages:
            ids = look.ids(list(self._request.prompt_ids[start:stop]))
            logprob = self._model.mean_logprob(
                ids, len(look.asked), adapter=self._adapter, breaks=breaks
            )
            self.likelihoods.append(max(math.exp(logprob), math.ulp(0.0)))
