"""Penalties on tokens that a prompt or an answer already has."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from gemserve.contract.prompt_parts import TokenArray
from gemserve.contract.sampling import SamplingParams
from gemserve.model.passes.transfer import to_device


class Penalties:
    """One request's penalties, and how often each token was drawn.

    All tokens of a vocabulary may be penalized, in each of 128 choices. So a step costs some tensor
    operations, and no loop over tokens. `prompt_ids`: ascending and each once; it is kept as it
    is, for all choices may share it.
    """

    def __init__(self, params: SamplingParams, prompt_ids: Sequence[int] | TokenArray) -> None:
        self._params = params
        self._prompt_ids = np.asarray(prompt_ids, dtype=np.int64)
        self._places: dict[int, int] = {}  # of the tokens that only the answer has
        self._new: list[int] = []  # drawn since `apply` was last called
        # those of the prompt, and behind them the others in the order of `_places`
        self._tokens: torch.Tensor | None = None  # [capacity], int64
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
        num_prompt = len(self._prompt_ids)
        if self._tokens is None or self._counts is None:
            self._tokens = to_device(self._prompt_ids, torch.long, device)
            self._counts = torch.zeros(num_prompt, dtype=torch.float64, device=device)
        new, self._new = self._new, []
        for token in new:  # one a step
            place = int(self._prompt_ids.searchsorted(token))
            if place == num_prompt or self._prompt_ids[place] != token:
                place = self._places.setdefault(token, num_prompt + len(self._places))
                if place == len(self._tokens):  # twice the size, so that a copy is rare
                    more = max(16, len(self._tokens))
                    self._tokens = torch.cat([self._tokens, self._tokens.new_zeros(more)])
                    self._counts = torch.cat([self._counts, self._counts.new_zeros(more)])
                self._tokens[place] = token
            self._counts[place] += 1
        count = num_prompt + len(self._places)
        return self._tokens[:count], self._counts[:count]
