"""Proves and measures everything that runs on a GPU, on one GPU, within minutes.

Every Triton kernel against its plain twin; what the device can do at best, and each kernel's and
attention backend's share of it; then Llama-3.1-8B's shapes with random weights: time to first
token, memory, decoding, requests per second. What came of it, and how far from the targets, is in
`gpu.json` and pictures. Nothing is downloaded. docs/gpu.md explains the figures.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from gpu_sections.pictures import draw_all
from gpu_sections.plan import ALWAYS, SECTIONS
from gpu_sections.record import OUT_OF_TIME, figure, read_json, write_json
from gpu_sections.targets import judge

SCHEMA = 1
ROOT = Path(__file__).resolve().parent.parent
# Of the time there is, what is left for merging and drawing, and what a section may overrun by.
_REPORT_S = 15.0
_GRACE_S = 20.0
# To import torch and transformers, from a cold disk.
_START_S = 180.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="a folder, made if missing")
    parser.add_argument("--sections", default=",".join(SECTIONS), help="default: all")
    parser.add_argument("--minutes", type=float, default=8.5, help="default: %(default)s")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on the CPU")
    parser.add_argument("--report", action="store_true", help="measure nothing: what --out holds")
    parser.add_argument("--commit", help="of the code, where git does not tell")
    parser.add_argument("--json", action="store_true", help="only the result line")
    arguments = parser.parse_args()
    sections = arguments.sections.split(",")
    for name in sections:
        if name not in SECTIONS:
            parser.error(f"--sections {name!r}: must be among {', '.join(SECTIONS)}")
    if arguments.minutes <= 0:
        parser.error(f"--minutes {arguments.minutes}: must be above 0")

    folder: Path = arguments.out / "sections"
    folder.mkdir(parents=True, exist_ok=True)
    if not arguments.report:
        wanted = [name for name in SECTIONS if name in (*ALWAYS, *sections)]
        for name in wanted:
            (folder / f"{name}.json").unlink(missing_ok=True)
        measure(arguments, wanted, folder)
    report = merge(folder)
    report["pictures"] = draw_all(report["rows"], _title(report), arguments.out)
    write_json(arguments.out / "gpu.json", report)
    if not arguments.json:
        print_tables(report)
    print(json.dumps(report))
    if all(row["status"] != "measured" for row in report["rows"]):
        sys.exit(f"nothing was measured: see {arguments.out / 'worker.log'}")


def measure(arguments: argparse.Namespace, wanted: list[str], folder: Path) -> None:
    """Run the sections in a worker; where it dies, the rest in another one."""
    until_s = time.time() + 60 * arguments.minutes
    commit = arguments.commit or _commit()
    pending = list(wanted)
    while pending:
        command = [sys.executable, "-m", "gpu_sections.worker", "--folder", str(folder)]
        command += ["--sections", ",".join(pending), "--until", str(until_s - _REPORT_S)]
        command += ["--commit", commit, *(["--smoke"] if arguments.smoke else [])]
        log_path = folder.parent / "worker.log"
        with log_path.open("ab") as log:
            started_at = log.tell()
            worker = subprocess.Popen(
                command, stdout=log, stderr=log, env=_environment(arguments.smoke), cwd=ROOT
            )
            try:
                reason = watch(worker, folder, until_s, arguments.json)
            finally:
                worker.kill()
                worker.wait()
        if reason is None:
            reason = f"its process ended with status {worker.returncode}"
        said = log_path.read_bytes()[started_at:].decode(errors="replace").strip()
        pending = close(folder, pending, f"{reason}; last words: {said[-800:]}", until_s)


def watch(worker: Any, folder: Path, until_s: float, is_quiet: bool) -> str | None:
    """Until the worker ends, or has to be killed: then why."""
    started_s, shown = time.time(), ""
    while worker.poll() is None:
        time.sleep(0.2)
        now = time.time()
        # a folder may hold sections of a run that was itself killed
        begun = [s for s in _read_all(folder).values() if _started_s(s) >= started_s]
        for section in (s for s in begun if s["status"] == "running"):
            if section["section"] != shown and not is_quiet:
                shown = section["section"]
                print(f"{shown} …", file=sys.stderr, flush=True)
            limit_s = section["limit"]["value"]
            if now > _started_s(section) + limit_s + _GRACE_S:
                return f"killed: took more than {limit_s + _GRACE_S:.0f} s"
        if now > until_s:
            return "killed: the whole run's time was up"
        if not begun and now > started_s + _START_S:
            return f"killed: nothing began within {_START_S:.0f} s"
    return None


def close(folder: Path, pending: list[str], reason: str, until_s: float) -> list[str]:
    """Say of a section that was under way how it ended; which have yet to be run."""
    found = _read_all(folder)
    for name in pending:
        section = found.get(name)
        if section is not None and section["status"] == "running":
            ended = {"status": "failed", "reason": reason}
            took = figure(time.time() - _started_s(section), "s")
            write_json(folder / f"{name}.json", section | ended | {"took": took})
    left = [name for name in pending if name not in found]
    if left == pending or time.time() > until_s - _REPORT_S:
        # nothing began: another worker would do no better
        for name in left:
            why = reason if left == pending else OUT_OF_TIME
            blank = {"section": name, "status": "skipped", "reason": why, "origin": None}
            write_json(folder / f"{name}.json", blank | {"rows": []})
        return []
    return left


def merge(folder: Path) -> dict[str, Any]:
    """One report of all sections, but those of another commit or device than the latest."""
    found = _read_all(folder)
    latest = max(
        (s for s in found.values() if s["origin"] is not None),
        key=_started_s,
        default=None,
    )
    origin = {"commit": "unknown", "device": "unknown", "is_smoke": False}
    if latest is not None:
        origin = latest["origin"]
    ours = {n: s for n, s in found.items() if s["origin"] in (None, origin)}
    rows = [{"section": name, **row} for name, section in ours.items() for row in section["rows"]]
    environment = next((r["labels"] for r in rows if r["section"] == "environment"), {})
    return {
        "benchmark": "gpu",
        "schema": SCHEMA,
        "device": origin["device"],
        "commit": origin["commit"],
        "is_smoke": origin["is_smoke"],
        "versions": {k: v for k, v in environment.items() if k not in ("device", "nvidia_smi")},
        "sections": {
            name: {key: value for key, value in section.items() if key not in ("rows", "section")}
            for name, section in ours.items()
        },
        "left_out": sorted(set(found) - set(ours)),
        "targets": judge(rows),
        "rows": rows,
    }


def print_tables(report: dict[str, Any]) -> None:
    print(f"{_title(report)}\n")
    for name, section in report["sections"].items():
        took = section.get("took", {}).get("value")
        seconds = "" if took is None else f"{took:.1f} s"
        print(f"{name}: {section['status']} {seconds} {section['reason'] or ''}".rstrip())
        for row in report["rows"]:
            if row["section"] == name:
                about = ", ".join(f"{k} {v}" for k, v in row["labels"].items() if v is not None)
                told = ", ".join(f"{k} {_told(v)}" for k, v in row["figures"].items())
                print(f"    {about}: {told or row['reason']}")
    print()
    for target in report["targets"]:
        limit, measured = target["limit"]["value"], target["measured"]["value"]
        told = "–" if measured is None else f"{measured:.3g}"
        goal = f"{target['relation']} {limit:.3g}"
        print(f"{target['target']:60} {goal:>15} {told:>8}  {target['verdict']}")


def _told(of: dict[str, Any]) -> str:
    value, unit = of["value"], of["unit"]
    if value is None:
        return of.get("not_finite", "–")
    if unit in ("bytes", "bytes/s", "FLOP/s") and value >= 1e9:
        power, letter = (1e12, "T") if value >= 1e12 else (1e9, "G")
        return f"{value / power:.4g} {letter}{unit}"
    return f"{value:.4g}" if unit in ("1", "bool") else f"{value:.4g} {unit}"


def _title(report: dict[str, Any]) -> str:
    torch, dry = report["versions"].get("torch"), " (dry run)" if report["is_smoke"] else ""
    return f"{report['device']}, torch {torch}, gemserve {report['commit']}{dry}"


def _started_s(section: dict[str, Any]) -> float:
    """By `time.time()`; 0: never."""
    started_s: float = section.get("started_unix", {"value": 0.0})["value"]
    return started_s


def _read_all(folder: Path) -> dict[str, dict[str, Any]]:
    found = {name: read_json(folder / f"{name}.json") for name in SECTIONS}
    return {name: section for name, section in found.items() if section is not None}


def _environment(is_smoke: bool) -> dict[str, str]:
    """Of a worker: it measures the code beside this file, whatever is installed."""
    packages = [str(ROOT / name) for name in ("benchmarks", "server", "kernels", "clients")]
    given = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*packages, *([given] if given else [])])
    made = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if is_smoke:  # Triton's kernels run in its interpreter, which asks once
        made["TRITON_INTERPRET"] = "1"
    return made


def _commit() -> str:
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12"]
    with contextlib.suppress(OSError):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.stdout.strip() or "unknown"
    return "unknown"


if __name__ == "__main__":
    main()
