"""What was aimed at, and whether it was met: from the rows alone, so that any report can be judged.

Nothing here is an assertion: a target is met, missed or not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

Rows = Sequence[Mapping[str, Any]]  # with their section
_LENGTH = 131072


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """`measured`: finds the figure, or None."""

    name: str
    relation: Literal["at most", "at least"]
    limit: float
    measured: Callable[[Rows], float | None]

    def judge(self, rows: Rows) -> dict[str, Any]:
        value = self.measured(rows)
        if value is None:
            verdict = "not measured"
        else:
            is_met = value <= self.limit if self.relation == "at most" else value >= self.limit
            verdict = "met" if is_met else "missed"
        return {
            "target": self.name,
            "relation": self.relation,
            "limit": {"value": self.limit, "unit": "1"},
            "measured": {"value": value, "unit": "1"},
            "verdict": verdict,
        }


def find(rows: Rows, section: str, name: str, **labels: Any) -> float | None:
    """A figure of the first measured row with these labels."""
    for row in rows:
        if row["section"] != section or row["status"] != "measured":
            continue
        if all(row["labels"].get(label) == value for label, value in labels.items()):
            value: float | None = row["figures"].get(name, {}).get("value")
            if value is not None:
                return value
    return None


def _to_none(name: str, variant: str = "default") -> Callable[[Rows], float | None]:
    """Of sieve, where both were measured in one run."""
    labels = {"variant": variant, "method": "sieve", "prompt_tokens": _LENGTH}
    return lambda rows: find(rows, "ttft", f"{name}_to_none", **labels)


def _filter_attention(rows: Rows) -> float | None:
    labels = {"where": "filter pass", "prompt_tokens": _LENGTH}
    return find(rows, "attention", "share_of_alone", **labels)


def _score_kernel(rows: Rows) -> float | None:
    return find(rows, "rates", "share_of_copy", kernel="largest_attention", keys=_LENGTH)


def _graph_decode(rows: Rows) -> float | None:
    """Decoding that runs as graphs, whatever these are called."""
    captured = [row for row in rows if row["labels"].get("cuda_graphs", "off") != "off"]
    return find(captured, "decode", "share_of_copy", sequences=1)


TARGETS = (
    Target(
        name="TTFT of sieve / none, 128K tokens",
        relation="at most",
        limit=0.42,
        measured=_to_none("ttft"),
    ),
    Target(
        name="TTFT of sieve with FP8 products / none, 128K tokens",
        relation="at most",
        limit=0.38,
        measured=_to_none("ttft", "fp8 filter"),
    ),
    Target(
        name="KV while decoding, sieve / none, 128K tokens",
        relation="at most",
        limit=0.011,
        measured=_to_none("decode_kv"),
    ),
    Target(
        name="filter pass's attention / the backend alone, 128K tokens",
        relation="at least",
        limit=0.8,
        measured=_filter_attention,
    ),
    Target(
        name="score kernel / copy bandwidth, 128K tokens",
        relation="at least",
        limit=0.7,
        measured=_score_kernel,
    ),
    Target(
        name="decoding one sequence as a graph / copy bandwidth",
        relation="at least",
        limit=0.6,
        measured=_graph_decode,
    ),
)


def judge(rows: Rows) -> list[dict[str, Any]]:
    return [target.judge(rows) for target in TARGETS]
