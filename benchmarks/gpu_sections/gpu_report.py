"""The report of `gpu.py`: rows with units, shares of the ceilings, targets and tables.

Everything is made from the files that the sections have left, so it can be made again at any time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

Row = dict[str, Any]
SCHEMA = 1
LONGEST = 131072
_TIMED = ("ttft", "windows", "million", "large")  # sections of `ttft.py`
# Figures of the scripts' rows by their names there: the name in the report, and the unit.
FIGURES = {
    **{f"{name}_s": (name, "s") for name in ("time", "plain_time", "first_call", "pass_time")},
    **{f"{name}_s": (name, "s") for name in ("ttft", "total", "generation", "step")},
    **{f"gap_{name}_s": (f"gap_{name}", "s") for name in ("p50", "p99")},
    **{f"gap_{name}_beside_s": (f"gap_{name}_beside", "s") for name in ("p50", "p99")},
    **{f"ttft_{name}_s": (f"ttft_{name}", "s") for name in ("alone", "beside")},
    **{f"{name}_bytes": (name, "bytes") for name in ("peak_memory", "peak_kv", "decode_kv")},
    **{f"{name}_bytes": (name, "bytes") for name in ("memory", "free_memory", "read")},
    "attention_time_s": ("attention_time", "s"),
    "seconds": ("time", "s"),
    "weight_bytes": ("weights", "bytes"),
    "bytes_per_s": ("bandwidth", "bytes/s"),
    "flops_per_s": ("rate", "FLOP/s"),
    "tokens_per_s": ("tokens", "tokens/s"),
    "requests_per_s": ("requests", "requests/s"),
    "prompt_tokens_per_s": ("prompt", "tokens/s"),
    "generated_tokens_per_s": ("generated", "tokens/s"),
    "prompt_flops": ("prompt_flops", "FLOP"),
    "samples": ("samples", "runs"),
    "finished": ("finished", "requests"),
    "asked": ("asked", "requests"),
    "parameters": ("parameters", "parameters"),
    "cpu_cores": ("cpu_cores", "cores"),
    "multiprocessors": ("multiprocessors", "multiprocessors"),
    **{name: (name, "tests") for name in ("passed", "failed", "skipped")},
}
# Name, whether the value must be at most or at least the limit, the limit, and where it is found:
# section, figure and labels.
TARGETS: tuple[tuple[str, str, float, str, str, Mapping[str, Any]], ...] = (
    (
        *("TTFT of sieve / none, 128K tokens", "at most", 0.42, "ttft", "ttft_to_none"),
        {"variant": "default", "method": "sieve", "prompt_tokens": LONGEST},
    ),
    (
        *("TTFT of sieve with FP8 products / none, 128K tokens", "at most", 0.38),
        *("ttft", "ttft_to_none"),
        {"variant": "fp8 filter", "method": "sieve", "prompt_tokens": LONGEST},
    ),
    *(
        (
            *(f"TTFT of windows / none, 128K tokens, {about}", "at most", 0.2),
            *(section, "ttft_to_none"),
            {"variant": "default", "method": "windows", "prompt_tokens": LONGEST},
        )
        for section, about in (("windows", "8B"), ("large", "32B"))
    ),
    (
        *("share of the card's products while windows of 8B are read, 128K tokens", "at least"),
        *(0.6, "windows", "share_of_bf16"),
        {"variant": "default", "method": "windows", "prompt_tokens": LONGEST},
    ),
    (
        *("KV while decoding, sieve / none, 128K tokens", "at most", 0.011),
        *("ttft", "decode_kv_to_none"),
        {"variant": "default", "method": "sieve", "prompt_tokens": LONGEST},
    ),
    (
        *("filter pass's attention / the backend alone, 128K tokens", "at least", 0.8),
        *("attention", "share_of_alone"),
        {"where": "filter pass", "prompt_tokens": LONGEST},
    ),
    (
        *("score kernel / copy bandwidth, 128K tokens", "at least", 0.7),
        *("rates", "share_of_copy"),
        {"kernel": "largest_attention", "keys": LONGEST},
    ),
    (
        *("decoding one sequence as a graph / copy bandwidth", "at least", 0.8),
        *("decode", "share_of_copy"),
        {"sequences": 1, "cuda_graphs": "on"},
    ),
)


def figure(value: float | None, unit: str) -> dict[str, Any]:
    """JSON has no NaN and no infinity: such a value is null, and `not_finite` says which it was."""
    if value is not None and not math.isfinite(value):
        return {"value": None, "unit": unit, "not_finite": str(value)}
    return {"value": value, "unit": unit}


def read_rows(path: Path) -> list[Row]:
    """The rows that a script has written with `--rows`, of which the last one with its labels."""
    rows: dict[str, Row] = {}
    text = path.read_text() if path.exists() else ""
    for line in text[: text.rfind("\n") + 1].splitlines():  # a killed script may leave half a line
        found = json.loads(line)
        labels, row = found["labels"], found["row"]
        reason = row.pop("reason", None)
        status = "measured"
        if reason is not None:
            status = "skipped" if reason.startswith("skipped") else "failed"
        named = {key: FIGURES.get(key, (key, "1")) for key in row if key not in labels}
        figures = {name: figure(row[key], unit) for key, (name, unit) in named.items()}
        # a contestant that has failed once is known by the labels it had then
        rows[json.dumps(labels)] = {
            "labels": labels,
            "status": status,
            "reason": reason,
            "figures": figures,
        }
    return list(rows.values())


def find(rows: Sequence[Row], section: str, name: str, **labels: Any) -> float | None:
    """The value of a figure in the first measured row that has it and these labels."""
    for row in rows:
        if row["section"] == section and row["status"] == "measured":
            value: float | None = row["figures"].get(name, {}).get("value")
            if value is not None and labels.items() <= row["labels"].items():
                return value
    return None


def chunk_rows(rows: Sequence[Row]) -> list[Row]:
    """Rows of `ttft.py` by chunk size as one row a size, of which one is the fastest in sum."""
    found: dict[int, Row] = {}
    for row in rows:
        tokens, method = row["labels"].get("max_chunk_tokens"), row["labels"]["method"]
        made = found.setdefault(
            tokens, row | {"labels": {"max_chunk_tokens": tokens}, "figures": {}}
        )
        if row["status"] == "measured":
            made["figures"][f"{method}_ttft"] = row["figures"]["ttft"]
        else:
            made |= {"status": row["status"], "reason": row["reason"]}
    measured = [row for row in found.values() if row["status"] == "measured"]
    sums = [sum(f["value"] or 0 for f in row["figures"].values()) for row in measured]
    for row, total in zip(measured, sums, strict=True):
        row["figures"]["is_fastest"] = figure(int(total == min(sums)), "bool")
    return list(found.values())


def add_shares(rows: Sequence[Row]) -> None:
    """Set beside each figure its share of a ceiling, or its ratio to what `none` took."""
    copy = find(rows, "ceilings", "bandwidth", ceiling="copy")
    bf16 = find(rows, "ceilings", "rate", ceiling="bf16")

    def ratio(row: Row, name: str, value: float | None, other: float | None) -> None:
        known = value is not None and bool(other)
        row["figures"][name] = figure(value / other if known else None, "1")

    for row in rows:
        section, labels, figures = row["section"], row["labels"], row["figures"]
        if row["status"] != "measured":
            continue

        def value(name: str, figures: Row = figures) -> float | None:
            return figures.get(name, {}).get("value")

        if section == "decode" and value("read") is not None:
            figures["bandwidth"] = figure(value("read") / value("step"), "bytes/s")
        if section in _TIMED and value("ttft"):
            figures["rate"] = figure(value("prompt_flops") / value("ttft"), "FLOP/s")
        if section in ("rates", "decode"):
            ratio(row, "share_of_copy", value("bandwidth"), copy)
        if section in ("rates", "attention", *_TIMED):
            ratio(row, "share_of_bf16", value("rate"), bf16)
        if labels.get("where") == "filter pass":
            same = {key: labels[key] for key in ("backend", "prompt_tokens")}
            alone = find(rows, "attention", "rate", where="alone", **same)
            ratio(row, "share_of_alone", value("rate"), alone)
        if section in _TIMED:
            same = {"method": "none", "prompt_tokens": labels["prompt_tokens"]}
            for name in ("ttft", "total", "peak_memory", "peak_kv", "decode_kv"):
                none = find(rows, section, name, **same)
                if value(name) is not None and none:
                    ratio(row, f"{name}_to_none", value(name), none)


def judge(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each target: met, missed or not measured. Nothing here is an assertion."""
    judged: list[dict[str, Any]] = []
    for name, relation, limit, section, key, labels in TARGETS:
        value, verdict = find(rows, section, key, **labels), "not measured"
        if value is not None:
            is_met = value <= limit if relation == "at most" else value >= limit
            verdict = "met" if is_met else "missed"
        judged.append(
            {
                "target": name,
                "relation": relation,
                "limit": figure(limit, "1"),
                "measured": figure(value, "1"),
                "verdict": verdict,
            }
        )
    return judged


def merge(sections: Mapping[str, dict[str, Any]], folder: Path) -> dict[str, Any]:
    """One report of all sections, but those of another commit or device than the latest.

    `sections`: what `gpu.py` has noted of each; its rows are in `folder`.
    """
    latest = max(
        (s for s in sections.values() if s["origin"] is not None),
        key=lambda s: s["started_unix"]["value"],
        default=None,
    )
    origin = {"commit": "unknown", "device": "unknown", "is_smoke": False}
    if latest is not None:
        origin = latest["origin"]
    ours = {name: s for name, s in sections.items() if s["origin"] in (None, origin)}
    rows: list[Row] = []
    for name in ours:
        found = read_rows(folder / f"{name}.jsonl")
        found = chunk_rows(found) if name == "chunks" else found
        rows += [{"section": name, **row} for row in found]
    add_shares(rows)
    environment = next((r["labels"] for r in rows if r["section"] == "environment"), {})
    return {
        "benchmark": "gpu",
        "schema": SCHEMA,
        **origin,
        "versions": {k: v for k, v in environment.items() if k not in ("device", "nvidia_smi")},
        "sections": ours,
        "left_out": sorted(set(sections) - set(ours)),
        "targets": judge(rows),
        "rows": rows,
    }


def title(report: Mapping[str, Any]) -> str:
    smoke = ", dry run: its figures mean nothing" if report["is_smoke"] else ""
    return f"{report['device']}, commit {report['commit']}{smoke}"


def print_tables(report: Mapping[str, Any]) -> None:
    def shown(found: Mapping[str, Any]) -> str:
        value = found.get("not_finite", found["value"])
        text = f"{value:.4g}" if isinstance(value, float) else str(value)
        return text if found["unit"] == "1" else f"{text} {found['unit']}"

    print(f"{title(report)}\n")
    for name, section in report["sections"].items():
        took = section.get("took", {}).get("value")
        seconds = "" if took is None else f"{took:.1f} s"
        print(f"{name}: {section['status']} {seconds} {section['reason'] or ''}".rstrip())
        for row in (row for row in report["rows"] if row["section"] == name):
            about = ", ".join(f"{k} {v}" for k, v in row["labels"].items() if v is not None)
            figures = ", ".join(f"{k} {shown(v)}" for k, v in row["figures"].items())
            print(f"    {about}: {figures or row['reason']}")
    print()
    for target in report["targets"]:
        limit, measured = shown(target["limit"]), shown(target["measured"])
        print(f"{target['verdict']}: {target['target']}: {measured} ({target['relation']} {limit})")
