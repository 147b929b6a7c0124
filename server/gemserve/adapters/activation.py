"""`activation`: one vector that is added before one layer.

It is the uniform special case of Activation Prompts, which add one vector per position.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gemserve.adapters.tensor_checks import check_squares, take
from gemserve.errors import AdapterError, shown
from gemserve.model.adapter import Adapter, StepTerms
from gemserve.model.passes.causal_model import CausalModel


class Activation(Adapter):
    """`vector`: [hidden_size], in the model's dtype, added to what enters layer `layer`."""

    def __init__(self, name: str, version: str, *, vector: torch.Tensor, layer: int) -> None:
        super().__init__(name, version)
        self.vector, self.layer = vector, layer

    @property
    def num_bytes(self) -> int:
        return self.vector.numel() * self.vector.element_size()

    def shift(self, layer: int) -> torch.Tensor | None:
        return self.vector if layer == self.layer else None

    def step_terms(self) -> StepTerms:
        return StepTerms(shifts={self.layer: self.vector})


def build(
    name: str,
    version: str,
    tensors: Mapping[str, torch.Tensor],
    settings: Mapping[str, object],
    model: CausalModel,
) -> Activation:
    """Build the adapter. Raises `AdapterError` if vector or layer do not fit this model."""
    layer = settings.get("layer")
    if type(layer) is not int or not 0 <= layer < model.num_layers:
        raise AdapterError(f"layer={shown(layer)}: must be from 0 to {model.num_layers - 1}")
    taken = take(tensors, {"vector": (model.shape.hidden_size,)}, model.dtype, model.device)
    check_squares("vector", taken["vector"])
    return Activation(name, version, vector=taken["vector"], layer=layer)
