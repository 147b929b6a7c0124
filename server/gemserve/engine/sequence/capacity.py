"""Whether a request could run at all, if it were alone. No torch."""

from __future__ import annotations

from gemserve.cost import ModelShape
from gemserve.engine.sequence.sequence import Sequence
from gemserve.errors import CapacityExceeded


def check_capacity(sequence: Sequence, num_units: int, shape: ModelShape) -> None:
    """Raise `CapacityExceeded` if a sequence needs more than all of the KV memory."""
    needed_units = sequence.peak_units(shape.num_layers)
    if needed_units > num_units:
        raise CapacityExceeded(
            tokens=sequence.num_prompt,
            kept=sequence.num_kept,
            max_tokens=sequence.request.sampling.max_tokens,
            needed_bytes=needed_units * shape.unit_bytes,
            limit_bytes=num_units * shape.unit_bytes,
        )
