"""Drawing the next token. A request's draws depend on its own seed alone."""

from __future__ import annotations

import torch

from gemserve.types import SamplingParams


class InvalidLogits(ArithmeticError):
    """The model produced NaN, or nothing but −inf."""


class Sampler:
    """Draws one request's tokens, in order, with its own generator."""

    def __init__(self, params: SamplingParams) -> None:
        self._params = params
        self._generator = torch.Generator()
        if params.seed is None:
            self._generator.seed()
        else:
            self._generator.manual_seed(params.seed % (1 << 63))

    def draw(self, logits: torch.Tensor) -> int:
        """The next token given `logits` [vocab], float32, on any device."""
        if not torch.isfinite(logits.max()):
            raise InvalidLogits("the model's logits are not finite")
        params = self._params
        if params.temperature == 0:
            return int(logits.argmax())
        # on the CPU, so that a seed means the same on every device
        probabilities = filtered_probabilities(logits.cpu(), params)
        return int(torch.multinomial(probabilities, 1, generator=self._generator))


def filtered_probabilities(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """Temperature, then top_k, then top_p: [vocab], float32, summing to 1.

    Of equal logits at a border the lower ids stay. At least one token always stays.
    """
    # relative to the largest, or a tiny temperature overflows
    scaled = (logits - logits.max()) / params.temperature
    ordered, ids = scaled.sort(descending=True, stable=True)
    if 0 < params.top_k < ordered.shape[0]:
        ordered[params.top_k :] = -torch.inf
    kept = ordered.softmax(-1)
    if params.top_p < 1:
        mass_before = kept.cumsum(-1) - kept
        kept = kept.masked_fill(mass_before >= params.top_p, 0)
        kept[0] = ordered.softmax(-1)[0]
    return torch.zeros_like(kept).scatter_(0, ids, kept / kept.sum())
