"""The result of a calibration: recall by layer, the chosen layer, and trust in coverage."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gemserve.calibration.files import FORMAT
from gemserve.calibration.search.head_search import Head

CLEARLY = 0.05  # a difference of shares of right answers that counts


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerResult:
    """The best heads up to one layer, and how well they find what a question needs.

    `words`, `meaning`: the share of what is needed that is kept, averaged over keeping an eighth
    and a sixteenth of the document, for questions that repeat the words of their fact and for those
    that do not; None: there are none that any head finds. `recall`: the mean of both. `own_recall`:
    that of this layer's best single head. `work`: FLOPs before the first token, as a share of those
    without a filter. `seconds`: estimated time to the first token for the lengths `TIMED`.
    """

    layer: int
    heads: tuple[Head, ...]
    ends_with: bool
    recall: float
    words: float | None
    meaning: float | None
    own_recall: float
    work: float
    seconds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Trust:
    """How well coverage separates good from bad choices, on probes that did not set the bounds.

    `bound`, `window_bound`: of prompts that are read as one sequence, and in segments. Of each the
    share of choices that it distrusts: where the fact was found (false alarms), where the document
    has no answer (`absent`), where a question is about all of the text (`diffuse`), and where the
    fact was missed. None: there was no such choice to measure it on.
    """

    bound: float
    window_bound: float
    found: float | None
    missed: float | None
    absent: float | None
    diffuse: float | None
    window_found: float | None
    window_missed: float | None
    window_absent: float | None
    window_diffuse: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentResult:
    """How well segments of one size find what a question needs in longer documents.

    `window`: the most tokens of one; None: one pass. `recall`: the share of the needed tokens that
    are kept, with a thirty-second of the document. `work`: FLOPs of the filter pass over 32,768
    tokens, as a share of reading them whole.
    """

    window: int | None
    recall: float
    work: float


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepResult:
    """How well the model answers from `keep` tokens of documents at most.

    `score`: the share of right answers.
    """

    keep: int
    score: float


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationResult:
    """The layer that calibration chose, with the figures of all layers.

    `recalls`, `confirmed`: of the chosen heads by kind of question, on the probes that they were
    chosen by and on those of other wording; the latter is empty if that was not measured.
    `whole_s`: estimated seconds to the first token without a filter, for the lengths `TIMED`.
    `segments`, `keeps`: what was chosen first, then others; empty if that was not measured.
    `whole_score`: the share of right answers to the same questions from whole prompts.
    `is_partial`: an interrupt ended the measuring.
    """

    layers: tuple[LayerResult, ...]
    chosen: LayerResult
    trust: Trust
    kinds: tuple[str, ...]
    num_probes: int
    prefers: str
    recalls: dict[str, float]
    confirmed: dict[str, float]
    whole_s: tuple[float, ...]
    segments: tuple[SegmentResult, ...] = ()
    keeps: tuple[KeepResult, ...] = ()
    whole_score: float | None = None
    is_partial: bool = False

    @property
    def more_distracts(self) -> bool:
        """Whether answers from whole prompts are clearly worse than those that were chosen."""
        whole = self.whole_score
        return whole is not None and self.keeps[0].score > whole + CLEARLY

    def describe(self) -> str:
        """How much the chosen heads find, in words."""
        shares = ((self.chosen.words, "by words"), (self.chosen.meaning, "by meaning"))
        return " and ".join(f"{share:.2f} {how}" for share, how in shares if share is not None)

    def as_json(self) -> dict[str, Any]:
        """The part of `calibration.json` that describes this result."""
        segments: dict[str, Any] = {}
        if self.segments:
            best = self.segments[0].window
            segments = {"window": best, "windows": [asdict(row) for row in self.segments]}
        keeps: dict[str, Any] = {}
        if self.keeps:
            keeps = {
                "auto_keep": self.keeps[0].keep,
                "more_distracts": self.more_distracts,
                "keeps": [asdict(row) for row in self.keeps],
                "whole_score": self.whole_score,
            }
        return {
            "format": FORMAT,
            "filter_layer": self.chosen.layer,
            "heads": [list(head) for head in self.chosen.heads],
            "ends_with": self.chosen.ends_with,
            "coverage_bound": self.trust.bound,
            "window_bound": self.trust.window_bound,
            **segments,
            **keeps,
            "recall": {"words": self.chosen.words, "meaning": self.chosen.meaning},
            "probes": {
                "kinds": list(self.kinds),
                "count": self.num_probes,
                "prefers": self.prefers,
                "recall": self.recalls,
                "confirmed": self.confirmed,
                "untrusted": asdict(self.trust),
            },
            "whole_s": self.whole_s,
            "layers": [asdict(row) for row in self.layers],
        }


def rounded_mean(values: Sequence[float]) -> float:
    """The mean to four digits; 0 of no values."""
    return round(sum(values) / len(values), 4) if values else 0.0
