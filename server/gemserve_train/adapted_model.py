"""A frozen model with an adapter in training, as a module that returns a loss."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gemserve.model.causal_model import CausalModel
from gemserve_train.examples import IGNORED
from gemserve_train.forward import Layout, packed_logits, recomputing
from gemserve_train.parameters import Parameters


class AdaptedModel(nn.Module):
    """Only the adapter has parameters. `is_recomputing`: see `forward.recomputing`."""

    def __init__(
        self, base: CausalModel, parameters: Parameters, *, is_recomputing: bool = False
    ) -> None:
        super().__init__()
        self.adapter_parameters = parameters
        model = parameters.replacement or base
        # torch does not look for modules in a tuple
        self._model = (recomputing(model) if is_recomputing else model,)

    def forward(
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor,
        layout: torch.Tensor | None = None,
        **_: Any,
    ) -> dict[str, torch.Tensor]:
        """The `loss`: the mean over all labels but `IGNORED` ones, which are not shifted.

        The arguments are what `pack` returns, or, without a `layout`, sequences of one length:
        [batch, tokens]. The model's head is computed only where there is a label.
        """
        if layout is None:
            rows = Layout(0, (input_ids.shape[1],) * input_ids.shape[0])
        else:
            shared, *lengths = layout.tolist()
            rows = Layout(shared, tuple(lengths))
        ids, targets = input_ids.flatten(), labels.flatten().clone()
        # nothing predicts the first token of a sequence
        targets[[start for start, _ in rows.bounds()]] = IGNORED
        wanted = (targets[1:] != IGNORED).nonzero().flatten()
        adapter = self.adapter_parameters.adapter()
        logits = packed_logits(self._model[0], adapter, ids, rows, wanted=wanted)
        return {"loss": F.cross_entropy(logits, targets[wanted + 1])}
