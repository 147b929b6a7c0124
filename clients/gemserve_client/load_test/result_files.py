"""Writes and reads a load test: `result.json` has every request, `requests.csv` a line for each."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gemserve_client.load_test.streamed_request import Record

Saved = dict[str, Any]  # a point: {"row", "began_s", "requests": [one dict a request]}


class UnreadableResult(Exception):
    """A file is not the `result.json` of a load test."""


def saved_point(row: Mapping[str, Any], records: Sequence[Record], began_s: float) -> Saved:
    """One point for `result.json`. `began_s` counts from the start of the first point."""
    return {"row": dict(row), "began_s": began_s, "requests": [_request(r) for r in records]}


def _request(record: Record) -> dict[str, Any]:
    gaps_s = record.gaps_s
    return {
        "index": record.index,
        "due_s": _rounded(record.due_s, 6),
        "started_s": _rounded(record.started_s, 6),
        "ended_s": _rounded(record.ended_s, 6),
        "ttft_ms": _ms(record.ttft_s),
        "tpot_ms": _ms(record.tpot_s if record.is_complete else None),
        "itl_mean_ms": _ms(sum(gaps_s) / len(gaps_s) if gaps_s else None),
        "e2e_ms": _ms(record.e2e_s if record.is_complete else None),
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": record.cached_tokens,
        "kept_tokens": record.kept_tokens,
        "is_filtered": record.is_filtered,
        "filter_reason": record.filter_reason,
        "output_tokens": record.output_tokens,
        "finish_reason": record.finish_reason,
        "error": record.error,
        "message": record.message,
    }


def write_json(folder: Path, result: Mapping[str, Any]) -> None:
    text = json.dumps(result, allow_nan=False)
    (folder / "result.json").write_text(text + "\n", encoding="utf-8")


def write_csv(folder: Path, points: Sequence[Saved]) -> None:
    """Write the requests of all points, one a line."""
    lines = [
        {"concurrency": p["row"]["concurrency"], "rate": p["row"]["rate"], **request}
        for p in points
        for request in p["requests"]
    ]
    with (folder / "requests.csv").open("w", encoding="utf-8", newline="") as file:
        if lines:
            writer = csv.DictWriter(file, fieldnames=list(lines[0]))
            writer.writeheader()
            writer.writerows(lines)


def read_json(path: Path) -> dict[str, Any]:
    """Read a `result.json`, or the one in a folder. Raises `UnreadableResult` with one line."""
    path = path / "result.json" if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UnreadableResult(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise UnreadableResult(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict) or not isinstance(content.get("points"), list):
        raise UnreadableResult(f"{path}: not the result.json of a load test (no points)")
    if content.get("benchmark") != "load":
        raise UnreadableResult(f"{path}: of the benchmark {content.get('benchmark')!r}, not 'load'")
    return content


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)
