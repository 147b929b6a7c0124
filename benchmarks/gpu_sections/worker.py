"""Runs sections one after the other, in a process of its own that `gpu.py` watches.

A kernel that reads where it may not takes the whole process's access to the device with it, and one
that never ends cannot be stopped from within. Whatever happens, the sections' files hold what was
measured before.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import time
from pathlib import Path

from gpu_sections.bench import Bench
from gpu_sections.machine import Machine
from gpu_sections.plan import FULL, SECTIONS, SMOKE, WITHOUT_MODEL
from gpu_sections.record import OUT_OF_TIME, DeviceLost, Record, describe

LOST = 75  # exit status: other sections may do better in another process
_LEAST_S = 3.0


def _import_all() -> None:
    """What a model takes, which from a cold disk is more than a section may take."""
    # what is missing is said by the sections that need it
    with contextlib.suppress(Exception):
        import harness  # noqa: F401
        import transformers.models.llama.modeling_llama  # noqa: F401

        import gemserve.engine.build  # noqa: F401


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--sections", required=True)
    parser.add_argument("--until", type=float, required=True, help="in seconds of time.time()")
    parser.add_argument("--commit", required=True)
    parser.add_argument("--smoke", action="store_true")
    arguments = parser.parse_args()
    machine = Machine("cpu" if arguments.smoke else "cuda")
    scale = SMOKE if arguments.smoke else FULL
    bench = Bench(machine=machine, scale=scale, folder=arguments.folder)
    origin = {
        "commit": arguments.commit,
        "device": machine.name,
        "is_smoke": arguments.smoke,
    }
    pending = arguments.sections.split(",")
    if not WITHOUT_MODEL.issuperset(pending):
        _import_all()
    while pending:
        name = pending[0]
        left_s = arguments.until - time.time()
        limit_s = left_s
        if not arguments.smoke:  # whose times mean nothing, and are long on a busy machine
            limit_s *= SECTIONS[name] / sum(SECTIONS[other] for other in pending)
        pending.pop(0)
        record = Record(
            arguments.folder / f"{name}.json",
            limit_s=max(0.0, limit_s),
            origin=origin,
            recover=machine.recover,
        )
        if left_s < _LEAST_S:
            record.finish("skipped", OUT_OF_TIME)
            continue
        try:
            importlib.import_module(f"gpu_sections.{name}").run(bench, record)
            record.finish("done")
        except DeviceLost as error:
            record.finish("failed", f"the device was lost: {error}")
            sys.exit(LOST)
        except Exception as error:
            record.finish("failed", describe(error))
            error.with_traceback(None)
        try:
            machine.recover()
        except DeviceLost as error:
            record.finish("failed", f"the device was lost at its end: {error}")
            sys.exit(LOST)


if __name__ == "__main__":
    main()
