"""Turns the records of a point into a row of rates, percentiles and goodput, and prints rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from gemserve_client.load_test.streamed_request import CANCELLED, Record
from gemserve_client.load_test.text_table import cell

Row = dict[str, Any]
STATISTICS = ("mean", "p50", "p95", "p99")
LATENCIES = {"ttft_ms": "TTFT", "tpot_ms": "TPOT", "itl_ms": "ITL", "e2e_ms": "E2E"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One line of a table: where its value is in a row, and whether more or less is better."""

    label: str
    keys: tuple[str, ...]
    is_higher_better: bool | None = None
    hides_zero: bool = False

    def of(self, row: Row) -> Any:
        value: Any = row
        for key in self.keys:
            value = value.get(key) if isinstance(value, dict) else None
        return value


METRICS = (
    Metric(label="completed", keys=("completed",)),
    Metric(label="errors", keys=("errors",)),
    Metric(label="cancelled", keys=("cancelled",), hides_zero=True),
    Metric(label="completed without text", keys=("without_text",), hides_zero=True),
    Metric(label="duration s", keys=("duration_s",)),
    Metric(label="prompt tokens (mean)", keys=("prompt_tokens",)),
    Metric(label="cached tokens (mean)", keys=("cached_tokens",), hides_zero=True),
    Metric(label="kept tokens (mean)", keys=("kept_tokens",)),
    Metric(label="filtered (share)", keys=("filtered_share",)),
    Metric(label="output tokens (mean)", keys=("output_tokens",)),
    Metric(label="requests/s", keys=("requests_per_s",), is_higher_better=True),
    Metric(label="output tokens/s", keys=("output_tokens_per_s",), is_higher_better=True),
    Metric(label="goodput requests/s", keys=("goodput",), is_higher_better=True),
    *(
        Metric(label=f"{name} {part} ms", keys=(key, part), is_higher_better=False)
        for key, name in LATENCIES.items()
        for part in STATISTICS
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slo:
    """Limits that a request must keep to count as goodput. None is no limit."""

    ttft_ms: float | None = None
    tpot_ms: float | None = None

    def is_met(self, record: Record) -> bool:
        """Whether a request keeps the limits.

        An answer of one token has no TPOT and meets any limit on it. An answer without text meets
        none.
        """
        if record.ttft_s is None:
            return False
        if self.ttft_ms is not None and record.ttft_s * 1000 > self.ttft_ms:
            return False
        tpot_s = record.tpot_s
        return self.tpot_ms is None or tpot_s is None or tpot_s * 1000 <= self.tpot_ms


def summarize(records: Sequence[Record], duration_s: float, slo: Slo) -> Row:
    """One row: latencies of the completed requests, and rates over `duration_s`."""
    done = [record for record in records if record.is_complete]
    kinds = Counter(record.error for record in records if record.error not in (None, CANCELLED))
    per_s = 1 / duration_s if duration_s > 0 else 0.0
    no_limit = slo.ttft_ms is None and slo.tpot_ms is None
    return {
        "completed": len(done),
        "errors": kinds.total(),
        "requests_per_s": len(done) * per_s,
        "output_tokens_per_s": sum(record.output_tokens for record in done) * per_s,
        "ttft_ms": _distribution(record.ttft_s for record in done),
        "tpot_ms": _distribution(record.tpot_s for record in done),
        "itl_ms": _distribution(gap_s for record in done for gap_s in record.gaps_s),
        "e2e_ms": _distribution(record.e2e_s for record in done),
        "goodput": None if no_limit else sum(map(slo.is_met, done)) * per_s,
        "errors_by_kind": dict(kinds.most_common()),
        "without_text": sum(record.ttft_s is None for record in done),
        "cancelled": sum(record.error == CANCELLED for record in records),
        "duration_s": duration_s,
        "prompt_tokens": _mean(record.prompt_tokens for record in done),
        "cached_tokens": _mean(record.cached_tokens for record in done),
        "kept_tokens": _mean(record.kept_tokens for record in done),
        "filtered_share": _mean(record.is_filtered for record in done),
        "output_tokens": _mean(record.output_tokens for record in done),
        "sent_late_p99_ms": sent_late_ms(records),
    }


def sent_late_ms(records: Sequence[Record]) -> float | None:
    """99th percentile of the delay between a request's due time and its sending.

    It is None if no request had a due time.
    """
    late = [record.started_s - record.due_s for record in records if record.due_s is not None]
    return float(np.percentile(late, 99)) * 1000 if late else None


def point_name(row: Row) -> str:
    """The varied setting of a point, for a table's head or a legend."""
    if row.get("rate") is not None:
        return f"rate {row['rate']:g}/s"
    return f"concurrency {row['concurrency']}"


def table(heads: Sequence[str], columns: Sequence[Row]) -> list[list[str]]:
    """A table with a line for each metric and a column for each row of a result.

    Lines that are empty in every column are left out.
    """
    lines = [["", *heads]]
    for metric in METRICS:
        values = [metric.of(row) for row in columns]
        if any(values if metric.hides_zero else (value is not None for value in values)):
            lines.append([metric.label, *map(cell, values)])
    return lines


def error_lines(points: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    """A table of point, kind of error, count, and the first message of that kind."""
    lines = [["at", "error", "count", "first message"]]
    for point in points:
        for kind, count in point["row"]["errors_by_kind"].items():
            first = next(r["message"] for r in point["requests"] if r["error"] == kind)
            lines.append([point_name(point["row"]), kind, str(count), first])
    return lines


def _distribution(seconds: Iterable[float | None]) -> dict[str, float | None]:
    values = np.fromiter((value for value in seconds if value is not None), dtype=float) * 1000
    if not values.size:
        return dict.fromkeys(STATISTICS)
    p50, p95, p99 = np.percentile(values, (50, 95, 99)).tolist()
    return {"mean": float(values.mean()), "p50": p50, "p95": p95, "p99": p99}


def _mean(values: Iterable[int | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None
