"""The result of a calibration: recall by layer, the chosen layer, and trust in coverage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gemserve.calibration.search.head_search import Head


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResult:
    """The best heads up to one layer, and how well they find what a question needs.

    `recall`: the share of the needed tokens that are kept, averaged over all probes and over
    keeping a sixteenth and a thirty-second of the document. `own_recall`: that of this layer's best
    single head. `work`: FLOPs before the first token, as a share of those without a filter.
    `score`: the share of right answers from the kept tokens; None if not measured.
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
    """How well coverage separates good from bad choices, on probes that did not set the bound.

    Each field is the share of choices below the bound: where the fact was found (false alarms),
    where the document has no answer (`absent`), and where a question is about all of the text
    (`diffuse`). None: there was no such choice to measure it on.
    """

    bound: float
    found: float | None
    absent: float | None
    diffuse: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowResult:
    """How well windows of one size find what a question needs in longer documents.

    `window`: the most tokens of one; None: one pass. `recall`: the share of the needed tokens that
    are kept, with a thirty-second of the document. `work`: FLOPs of the filter pass over 32,768
    tokens, as a share of reading them whole. `bound`: that of coverage.
    """

    window: int | None
    recall: float
    work: float
    bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepResult:
    """How well the model answers from `keep` tokens of documents at most.

    `second_look`: the best passages were read again and ranked anew. `score`: the share of right
    answers.
    """

    keep: int
    second_look: bool
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """The layer that calibration chose, with the figures of all layers.

    `full_score`: the share of right answers from whole prompts. `confirmed_recall`: the recall of
    the chosen heads on probes of other wording. Both are None if that was not measured. `windows`,
    `keeps`: what was chosen first, then others; empty if that was not measured. `is_partial`: an
    interrupt ended the measuring.
    """

    layers: tuple[LayerResult, ...]
    chosen: LayerResult
    trust: Trust
    kinds: tuple[str, ...]
    num_probes: int
    full_score: float | None
    confirmed_recall: float | None
    windows: tuple[WindowResult, ...] = ()
    keeps: tuple[KeepResult, ...] = ()
    is_partial: bool = False

    def as_json(self) -> dict[str, Any]:
        """The part of `calibration.json` that describes this result."""
        windows: dict[str, Any] = {}
        if self.windows:
            best = self.windows[0]
            windows = {"window": best.window, "windows": [asdict(row) for row in self.windows]}
            if best.window is not None:
                windows["window_bound"] = best.bound
        keeps: dict[str, Any] = {}
        if self.keeps:
            keeps = {
                "auto_keep": self.keeps[0].keep,
                "second_look": self.keeps[0].second_look,
                "keeps": [asdict(row) for row in self.keeps],
            }
        return {
            "filter_layer": self.chosen.layer,
            "heads": [list(head) for head in self.chosen.heads],
            "ends_with": self.chosen.ends_with,
            "coverage_bound": self.trust.bound,
            **windows,
            **keeps,
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


def rounded_mean(values: Sequence[float]) -> float:
    """The mean to four digits; 0 of no values."""
    return round(sum(values) / len(values), 4) if values else 0.0
