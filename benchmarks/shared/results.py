"""The rows of a benchmark's result: a table for people and, last, one JSON line for programs.

`gpu.py` runs the benchmarks with `--rows FILE`. Each row is then written to that file as soon as it
is measured, and a measurement that fails becomes a row with its reason, so that the others go on.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

import gemserve
from gemserve_client.load_test import result_line
from gemserve_client.load_test.text_table import aligned, cell

OUT_OF_TIME = "skipped: out of time"


class OutOfTime(Exception):
    """Raised by a measurement that notices that its time is over."""


class Rows(list[dict[str, Any]]):
    """Rows of one result. A row is its labels and its figures in one dictionary."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        super().__init__()
        self._path: Path | None = arguments.rows
        self._device: str = arguments.device
        self._ends_s = time.perf_counter() + arguments.seconds
        self._at: dict[str, int] = {}  # where the row with these labels is

    @property
    def left_s(self) -> float:
        return self._ends_s - time.perf_counter()

    def put(self, labels: Mapping[str, Any], figures: Mapping[str, Any]) -> None:
        """Add a row. It replaces an earlier row with the same labels."""
        row = {**labels, **figures}
        index = self._at.setdefault(json.dumps(labels), len(self))
        self[index:] = [row, *self[index + 1 :]]
        if self._path is not None:
            with self._path.open("a") as file:
                file.write(json.dumps({"labels": labels, "row": row}) + "\n")

    def attempt(
        self, labels: Mapping[str, Any], measure: Callable[[], Mapping[str, Any] | None]
    ) -> bool:
        """Add a row with what `measure` returns, if that is anything. Return whether it ran.

        Without `--rows` an error is raised as it is. With it, the row says why there are no
        figures; only an error after which the device no longer works is raised.
        """
        if self.left_s <= 0:
            self.put(labels, {"reason": OUT_OF_TIME})
            return False
        note(" ".join(str(value) for value in labels.values()))
        try:
            figures = measure()
        except OutOfTime:
            self.put(labels, {"reason": OUT_OF_TIME})
            return False
        except Exception as error:
            if self._path is None:
                raise
            text = f"{type(error).__name__}: {error}"
            error.with_traceback(None)  # its frames hold tensors
            self.put(labels, {"reason": text if len(text) < 1500 else f"{text[:1400]} […]"})
            free(self._device)
            torch.zeros(1, device=self._device).add_(1).item()  # does the device still answer?
            return False
        if figures is not None:
            self.put(labels, figures)
        return True


def add_common(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--repeats", type=int, default=3, help="default: %(default)s")
    parser.add_argument("--json", action="store_true", help="only the result line")


def add_row_options(parser: argparse.ArgumentParser) -> None:
    """The common options, and those of `Rows`."""
    add_common(parser)
    parser.add_argument("--rows", type=Path, help="append rows there, and go on after errors")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="begin no measurement after these"
    )


def numbers(text: str) -> list[int]:
    """Whole numbers with commas between them. An empty text has none."""
    return [int(part) for part in text.split(",") if part]


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def free(device: str) -> None:
    """Give memory back that nothing refers to any more."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()


_progress: tqdm[Any] | None = None


def note(text: str) -> None:
    """Show what is measured now, on a terminal only. An empty text removes the line."""
    global _progress
    if _progress is None:
        _progress = tqdm(bar_format="{desc} {elapsed}", leave=False, disable=None, file=sys.stderr)
    if text:
        _progress.set_description_str(text)
    else:
        _progress.close()
        _progress = None


def finish(name: str, device: str, rows: list[dict[str, Any]], quiet: bool) -> None:
    """Print a table for people and, last, one JSON object for programs."""
    note("")
    if not quiet and rows:
        columns = list(dict.fromkeys(k for row in rows for k, v in row.items() if v is not None))
        print(aligned([columns, *([cell(row.get(c)) for c in columns] for row in rows)]))
    versions = {
        "gemserve": gemserve.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    result = result_line.result(name, device_name(device), versions, rows)
    print(json.dumps(result))


def device_name(device: str) -> str:
    if device == "cuda":
        return torch.cuda.get_device_name()
    return f"cpu ({platform.machine()}, {torch.get_num_threads()} threads)"
