"""What a library's keys depend on: the model, its calibration, and what is before a segment."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass

from gemserve.contract.filter_options import Heads


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
    """Two models with the same `digest` have the same keys, but for rounding.

    `model`: its name, for people. `weights`, `tokenizer`: hashes. `layer`, `heads`: where the
    calibration looks. `num_key_heads`, `head_dim`: the size of a token's keys. `anchor`: tokens in
    front of each segment, of at most `window` tokens.
    """

    model: str
    weights: str
    tokenizer: str
    layer: int
    heads: Heads
    num_key_heads: int
    head_dim: int
    anchor: tuple[int, ...]
    window: int

    @property
    def digest(self) -> str:
        fields = asdict(self)
        del fields["model"]
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:32]

    @property
    def shown(self) -> str:
        """For messages."""
        heads = ", ".join(f"{layer}.{head}" for layer, head in self.heads)
        at = f"weights {self.weights[:8]}, tokenizer {self.tokenizer[:8]}, heads {heads}"
        return f"{self.model} ({at}, windows of {self.window})"

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @staticmethod
    def of_json(text: str) -> Identity:
        """Raises `ValueError`, `TypeError` or `KeyError` if it is none."""
        fields = json.loads(text)
        fields["heads"] = tuple((int(layer), int(head)) for layer, head in fields["heads"])
        fields["anchor"] = tuple(map(int, fields["anchor"]))
        return Identity(**fields)
