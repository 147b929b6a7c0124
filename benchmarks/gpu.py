"""Measures everything that runs on a GPU, on one GPU, within minutes.

Runs the other benchmarks at a GPU's scale, with the shapes of Llama-3.1-8B and random weights: each
section below in a process of its own, with a time limit. The report says how far the figures are
from the device's ceilings and from the targets. Nothing is downloaded. docs/benchmarks.md explains
it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))  # the repository root
sys.path.insert(0, str(Path(__file__).parents[1] / "clients"))  # whatever else is installed

from benchmarks.gpu_sections import gpu_pictures, gpu_report
from benchmarks.gpu_sections.gpu_report import figure
from gemserve_client.load_test import result_line

ROOT = Path(__file__).resolve().parents[1]
ALWAYS = ("environment", "ceilings")  # the others need what they find
OUT_OF_TIME = "skipped: out of time"
_REPORT_S = 15.0  # left for the report
_GRACE_S = 20.0  # a section may overrun its time by this; then it is killed
_LEAST_S = 3.0


@dataclass(frozen=True, slots=True)
class Section:
    """`share` of the time; what a section leaves goes to those after it. `script` and `options`.

    `full` and `smoke` are the options that set the scale.
    """

    share: float
    script: str
    options: str = ""
    full: str = ""
    smoke: str = ""
    chunked: bool = False  # takes the chunk size that was the fastest


SECTIONS = {
    "environment": Section(5, "gpu_sections/device_ceilings.py", "environment"),
    "ceilings": Section(
        *(15, "gpu_sections/device_ceilings.py", "ceilings"),
        full=f"--copy-bytes {2 << 30} --matmul-size 8192 --repeats 10",
        smoke=f"--copy-bytes {1 << 20} --matmul-size 64",
    ),
    "kernels": Section(75, "gpu_sections/kernel_tests.py", smoke="--files test_triton_pooling.py"),
    "rates": Section(
        *(40, "gpu_sections/kernel_rates.py", ""),
        full="--shape llama-8b --tokens 131072 --sequences 1,4,16,64,256 --repeats 10",
        smoke="--shape tiny --tokens 160 --sequences 1,3 --sequence-tokens 24 --queries 64 "
        "--keep 32",
    ),
    "model": Section(
        20, "gpu_sections/model_check.py", "", full="--shape llama-8b", smoke="--shape tiny"
    ),
    "chunks": Section(
        *(20, "ttft.py", "--methods none,sieve --skip-sdpa --fit-kv --repeats 1"),
        full="--shape llama-8b --lengths 32768 --chunk-tokens 2048,4096,8192,16384 "
        "--warm-up-tokens 4096",
        smoke="--shape tiny --lengths 192 --chunk-tokens 128,256 --warm-up-tokens 64 --keep 32",
    ),
    "attention": Section(
        *(50, "gpu_sections/attention.py", ""),
        full="--shape llama-8b --lengths 32768,131072 --warm-up-tokens 4096",
        smoke="--shape tiny --lengths 64,192 --warm-up-tokens 64 --keep 32",
        chunked=True,
    ),
    "ttft": Section(
        *(180, "ttft.py", "--methods none,sieve,gemfilter,snapkv --fit-kv"),
        full="--shape llama-8b --lengths 8192,32768,65536,131072 --warm-up-tokens 4096 "
        "--new-tokens 50 --repeats 3",
        smoke="--shape tiny --lengths 96,192 --warm-up-tokens 64 --new-tokens 4 --keep 32 "
        "--repeats 2",
        chunked=True,
    ),
    "windows": Section(
        *(60, "ttft.py", "--window 1536 --skip-sdpa"),
        full="--shape llama-8b --reader-shape qwen-0.5b --methods none,windows,reader "
        "--lengths 32768,131072 --warm-up-tokens 16384 --kv-memory 24GiB --repeats 3",
        smoke="--shape tiny --reader-shape tiny --methods none,windows,reader --lengths 192,400 "
        "--window 64 --warm-up-tokens 128 --keep 32 --repeats 2 --kv-memory 64MiB",
        chunked=True,
    ),
    "million": Section(
        *(40, "ttft.py", "--window 1536 --skip-sdpa --without-none --repeats 1"),
        full="--shape llama-8b --reader-shape qwen-0.5b --methods windows,reader "
        "--lengths 1048576 --warm-up-tokens 16384 --kv-memory 8GiB",
        smoke="--shape tiny --reader-shape tiny --methods windows,reader --lengths 2000 "
        "--window 64 --warm-up-tokens 128 --keep 32 --kv-memory 64MiB",
    ),
    "large": Section(
        *(100, "ttft.py", "--window 1536 --skip-sdpa --repeats 1"),
        full="--shape qwen-32b --reader-shape qwen-0.5b --methods none,windows,reader "
        "--lengths 32768,131072 --warm-up-tokens 4096 --kv-memory 36GiB",
        smoke="--shape tiny --reader-shape tiny --methods none,windows,reader --lengths 192 "
        "--window 64 --warm-up-tokens 128 --keep 32 --kv-memory 64MiB",
        chunked=True,
    ),
    "streams": Section(
        *(30, "speed/interleave.py", "--window 1536"),
        full="--shape llama-8b --prompt-tokens 131072 --streams 16 --max-tokens 8192 "
        "--warm-up-tokens 16384 --kv-memory 30GiB",
        smoke="--shape tiny --prompt-tokens 500 --window 64 --streams 2 --stream-tokens 24 "
        "--max-tokens 600 --keep 32 --warm-up-tokens 64 --kv-memory 64MiB",
        chunked=True,
    ),
    "decode": Section(
        *(70, "decode.py", "--engines gemserve --repeats 1"),
        full="--shape llama-8b --sequences 1,4,16,64,256 --new-tokens 32",
        smoke="--shape tiny --sequences 1,3 --prompt-tokens 24 --new-tokens 3",
    ),
    "throughput": Section(
        *(60, "speed/throughput.py", "--methods none,sieve"),
        full="--shape llama-8b --prompt-tokens 16384 --requests 24 --concurrency 12 "
        "--max-tokens 64 --keep 1024 --kv-memory 25GiB --warm-up-tokens 4096",
        smoke="--shape tiny --prompt-tokens 96 --requests 3 --concurrency 2 --max-tokens 3 "
        "--keep 32 --kv-memory 64MiB --warm-up-tokens 64",
        chunked=True,
    ),
}
VARIANTS = {"ttft": "default,fp8 filter", "decode": "default,eager"}
VARIANTS["windows"] = VARIANTS["large"] = "default,fp8 windows"
VARIANTS["throughput"] = VARIANTS["ttft"]


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
        measure(arguments, [n for n in SECTIONS if n in (*ALWAYS, *sections)], folder)
    report = gpu_report.merge(read_sections(folder), folder)
    report["pictures"] = gpu_pictures.draw_all(report, arguments.out)
    (arguments.out / "gpu.json").write_text(json.dumps(report, indent=1, allow_nan=False))
    if not arguments.json:
        gpu_report.print_tables(report)
    print(json.dumps(report))
    if all(row["status"] != "measured" for row in report["rows"]):
        sys.exit(f"nothing was measured: see {arguments.out / 'worker.log'}")


def measure(arguments: argparse.Namespace, pending: Sequence[str], folder: Path) -> None:
    """Run the sections one after the other, and note of each how it ended."""
    ends_s = time.time() + 60 * arguments.minutes - _REPORT_S
    origin: dict[str, Any] | None = None
    obstacle: str | None = None
    for name in pending:
        for ending in ("json", "jsonl"):
            (folder / f"{name}.{ending}").unlink(missing_ok=True)
    for number, name in enumerate(pending):
        left_s, limit_s = ends_s - time.time(), ends_s - time.time()
        if not arguments.smoke:  # its times are long on a busy machine, and mean nothing
            limit_s *= SECTIONS[name].share / sum(SECTIONS[n].share for n in pending[number:])
        note = {"status": "running", "reason": None, "origin": origin}
        note |= {"started_unix": figure(time.time(), "s"), "limit": figure(limit_s, "s")}
        if obstacle is not None or left_s < _LEAST_S:
            note |= {"status": "skipped", "reason": obstacle or OUT_OF_TIME}
            write_section(folder, name, note)
            continue
        write_section(folder, name, note)
        if not arguments.json:
            print(f"{name} …", file=sys.stderr, flush=True)
        reason = run(command_of(name, arguments, folder, limit_s), folder, limit_s + _GRACE_S)
        took = figure(time.time() - note["started_unix"]["value"], "s")
        note |= {"status": "done" if reason is None else "failed", "reason": reason, "took": took}
        if name == "environment":
            rows = gpu_report.read_rows(folder / f"{name}.jsonl")
            if not rows:  # there is no device to measure
                note["status"], obstacle = "skipped", reason
            else:
                device = rows[0]["labels"]["device"]
                commit = arguments.commit or result_line.commit()
                origin = {"commit": commit, "device": device, "is_smoke": arguments.smoke}
                note["origin"] = origin
        write_section(folder, name, note)


def command_of(name: str, arguments: argparse.Namespace, folder: Path, limit_s: float) -> list[str]:
    section = SECTIONS[name]
    options = f"{section.options} {section.smoke if arguments.smoke else section.full}".split()
    options += ["--device", "cpu" if arguments.smoke else "cuda", "--json"]
    options += ["--rows", str(folder / f"{name}.jsonl"), "--seconds", str(max(0.0, limit_s))]
    if name in VARIANTS:
        options += ["--variants", VARIANTS[name]]
    if section.chunked:
        rows = gpu_report.read_rows(folder / "chunks.jsonl")
        for row in gpu_report.chunk_rows(rows):
            if row["figures"].get("is_fastest", {}).get("value") == 1:
                options += ["--chunk-tokens", str(row["labels"]["max_chunk_tokens"])]
    return [sys.executable, str(ROOT / "benchmarks" / section.script), *options]


def run(command: Sequence[str], folder: Path, limit_s: float) -> str | None:
    """Run a section's process; kill it after `limit_s`. Return why it failed, or None."""
    packages = [str(ROOT / name) for name in ("server", "kernels", "clients")]
    given = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([*packages, *([given] if given else [])])
    environment = {**os.environ, "PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    if "cuda" not in command:
        environment["TRITON_INTERPRET"] = "1"  # Triton asks once
    log_path = folder.parent / "worker.log"
    with log_path.open("ab") as log:
        started_at = log.tell()
        worker = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment, cwd=ROOT, start_new_session=True
        )
        try:
            status = worker.wait(limit_s)
            reason = f"its process ended with status {status}"
        except subprocess.TimeoutExpired:
            status, reason = None, f"killed: took more than {limit_s:.0f} s"
        finally:
            if worker.poll() is None:
                os.killpg(worker.pid, signal.SIGKILL)
                worker.wait()
    if status == 0:
        return None
    output = log_path.read_bytes()[started_at:].decode(errors="replace").strip()
    return f"{reason}; the end of its output: {output[-800:]}"


def write_section(folder: Path, name: str, content: dict[str, Any]) -> None:
    """Replace the file at once: a reader gets the old content or the new."""
    part = folder / f"{name}.part"
    part.write_text(json.dumps(content, indent=1, allow_nan=False))
    part.replace(folder / f"{name}.json")


def read_sections(folder: Path) -> dict[str, dict[str, Any]]:
    """What is known of each section. One that was never finished has been stopped."""
    found: dict[str, dict[str, Any]] = {}
    for name in SECTIONS:
        path = folder / f"{name}.json"
        if path.exists():
            found[name] = json.loads(path.read_text())
            if found[name]["status"] == "running":
                found[name] |= {"status": "failed", "reason": "gpu.py was stopped"}
    return found


if __name__ == "__main__":
    main()
