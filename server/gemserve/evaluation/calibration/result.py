"""What a calibration came to: recall by layer, the choice, and what coverage is worth."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from gemserve.evaluation.calibration.head_search import Head


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResult:
    """The best heads up to one layer. `recall`: of the needed tokens, averaged over the probes and
    over a sixteenth and a thirty-second kept; `own_recall`: of this layer's best single head;
    `work`: floating-point operations up to the first token, as a share of reading everything.
    `score`: right answers from what the heads keep; None: not tried.
    """

    layer: int
    heads: tuple[Head, ...]
    ends_with: bool
    recall: float
    own_recall: float
    work: float
    score: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """How well coverage tells found from missed, on probes that did not set the bound.

    Shares of choices that are not trusted: of facts that were found (false alarms), of questions
    whose answer the document does not have, and of questions about all of its text.
    """

    bound: float
    found: float
    absent: float
    diffuse: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """What a calibration came to.

    `full_score`: right answers from the whole prompts; `confirmed_recall`: of the chosen heads on
    probes of other wording. None: not tried.
    """

    layers: tuple[LayerResult, ...]
    chosen: LayerResult
    trust: Trust
    kinds: tuple[str, ...]
    num_probes: int
    full_score: float | None
    confirmed_recall: float | None

    def as_json(self) -> dict[str, Any]:
        """What `calibration.json` holds of it."""
        return {
            "filter_layer": self.chosen.layer,
            "heads": [list(head) for head in self.chosen.heads],
            "ends_with": self.chosen.ends_with,
            "coverage_bound": self.trust.bound,
            "probes": {
                "kinds": list(self.kinds),
                "count": self.num_probes,
                "recall": self.chosen.recall,
                "confirmed_recall": self.confirmed_recall,
                "score": self.chosen.score,
                "full_score": self.full_score,
                "untrusted": asdict(self.trust),
            },
            "layers": [asdict(row) for row in self.layers],
        }
