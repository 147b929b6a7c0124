"""Penalties on tokens that a prompt or an answer already has."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from gemserve.contract.sampling import SamplingParams
from gemserve.model.passes.transfer import to_device


class Penalties:
    """One request's penalties, and how often each token was drawn.

    All tokens of a vocabulary may be penalized, in each of 128 choices. So a step costs some tensor
    operations, and no loop over tokens.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Iterable[int]) -> None:
        self._params = params
        # the repetition penalty alone looks at the prompt
        counted = dict.fromkeys(prompt_ids if params.repetition_penalty != 1 else ())
        self._places = {token: place for place, token in enumerate(counted)}
        self._new: list[int] = []  # drawn since `apply` was last called
        self._tokens: torch.Tensor | None = None  # [capacity], int64, in the order of `_places`
        self._counts: torch.Tensor | None = None  # [capacity], float64

    def __bool__(self) -> bool:
        params = self._params
        return bool(
            params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        )

    def note(self, token: int) -> None:
        """Remember a drawn token."""
        if self:
            self._new.append(token)

    def apply(self, logits: torch.Tensor) -> None:
        """Change the `logits` [vocab], float32, of tokens that are penalized."""
        if not self:
            return
        tokens, counts = self._counted(logits.device)
        params = self._params
        values = logits[tokens].double()
        if params.repetition_penalty != 1:
            factor = params.repetition_penalty
            values = torch.where(values > 0, values / factor, values * factor)
        if params.presence_penalty or params.frequency_penalty:
            penalty = params.presence_penalty + params.frequency_penalty * counts
            values = torch.where(counts > 0, values - penalty, values)
        logits[tokens] = values.float()

    def _counted(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens that the prompt or the answer has, each once, and how often it was drawn."""
        if self._tokens is None or self._counts is None:
            self._tokens = to_device(list(self._places), torch.long, device)
            self._counts = torch.zeros(len(self._places), dtype=torch.float64, device=device)
        new, self._new = self._new, []
        unknown = [token for token in dict.fromkeys(new) if token not in self._places]
        self._places |= {token: len(self._places) + i for i, token in enumerate(unknown)}
        if len(self._places) > len(self._tokens):  # twice the size, so that a copy is rare
            more = max(16, len(self._places), 2 * len(self._tokens)) - len(self._tokens)
            self._tokens = torch.cat([self._tokens, self._tokens.new_zeros(more)])
            self._counts = torch.cat([self._counts, self._counts.new_zeros(more)])
        for token in new:  # one a step
            place = self._places[token]
            self._tokens[place] = token
            self._counts[place] += 1
        return self._tokens[: len(self._places)], self._counts[: len(self._places)]
