"""The rows of `adapter_recall.py`: means over needles, and differences to no adapter."""

from __future__ import annotations

import json
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gemserve.evaluation.compare import compare
from gemserve.evaluation.run import Outcome

NO_ADAPTER = "none"
_SCORES = ("recall", "whole", "contains", "exact")


def find_lines(path: Path, run: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The finished measurements of a run. A line that was cut off is left out.

    Of one measurement the last line counts: one that failed may have been repeated.
    """
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for text in path.read_text().split("\n") if path.exists() else []:
        try:
            line = json.loads(text)
        except ValueError:
            continue
        if all(line.get(name) == value for name, value in run.items()):
            found[(line["index"], line["adapter"], line["version"], line["keep"])] = line
    return list(found.values())


def table(lines: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """One row for each filter and adapter.

    `recall`: the mean share of the needed tokens that were kept. `whole`: the share of needles of
    which all of them were kept. `difference`: the mean difference of recall to no adapter on the
    same needles, from `low` to `high` (95%); `worse` and `better` count the needles of which less
    and more was kept. The other scores have differences of their own.
    """
    groups: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for line in lines:
        groups.setdefault((line["keep"], line["adapter"], line["version"]), []).append(line)
    rows = []
    for keep, name, version in sorted(groups, key=_order):
        group = groups[keep, name, version]
        good = [_with_whole(line) for line in group if line["error"] is None]
        row: dict[str, Any] = {"keep": keep, "adapter": name, "kind": group[0]["kind"]}
        row |= {"version": version, "n": len(good), "failed": len(group) - len(good)}
        row |= {score: _mean(good, score) for score in _SCORES}
        row |= {"coverage": _mean(good, "coverage"), "kept_tokens": _mean(good, "kept_tokens")}
        row["fallbacks"] = sum(line["reason"] in ("diffuse_attention", "widened") for line in good)
        if name != NO_ADAPTER:
            plain = groups.get((keep, NO_ADAPTER, ""), [])
            others = [_with_whole(line) for line in plain if line["error"] is None]
            row |= _differences(good, others)
        rows.append(row)
    return rows


def _order(key: tuple[str, str, str]) -> tuple[Any, ...]:
    """The default filter is first, and no adapter before all adapters."""
    keep, name, version = key
    return keep != "default", keep, name != NO_ADAPTER, name, version


def _with_whole(line: dict[str, Any]) -> dict[str, Any]:
    return {**line, "whole": float(line["recall"] == 1.0)}


def _mean(lines: Sequence[dict[str, Any]], name: str) -> float | None:
    known = [line[name] for line in lines if line.get(name) is not None]
    return round(statistics.fmean(known), 4) if known else None


def _differences(
    ours: Sequence[dict[str, Any]], plain: Sequence[dict[str, Any]]
) -> dict[str, float]:
    """By needle: each score's mean difference, and its interval (95%)."""
    before = {line["index"]: line["recall"] for line in plain}
    gaps = [line["recall"] - before[line["index"]] for line in ours if line["index"] in before]
    row: dict[str, float] = {
        "worse": sum(gap < 0 for gap in gaps),
        "better": sum(gap > 0 for gap in gaps),
    }
    for score in _SCORES:
        outcomes = [
            _outcome(line, method, line[score])
            for method, lines in (("with", ours), (NO_ADAPTER, plain))
            for line in lines
            if line.get(score) is not None
        ]
        try:
            found = compare(outcomes, "with", NO_ADAPTER)
        except ValueError:  # no needle has both
            continue
        lead = "" if score == "recall" else f"{score}_"
        row[f"{lead}difference"] = round(found.difference, 4)
        row |= {f"{lead}low": round(found.low, 4), f"{lead}high": round(found.high, 4)}
    return row


def _outcome(line: Mapping[str, Any], method: str, score: float) -> Outcome:
    return Outcome(
        subtask=line["subtask"],
        prompt_tokens=line["tokens"],
        samples=line["needles"],
        index=line["index"],
        method=method,
        keep=0,
        score=score,
        recall=None,
        kept_tokens=line["kept_tokens"],
        depth=None,
        text="",
    )
