"""A runner in a process of its own. All that passes between it and the core is pickled data.

With GEMSERVE_TEST_RUNNER=pipe the engines that tests build by `core_over` have such a runner:

    GEMSERVE_TEST_RUNNER=pipe OMP_NUM_THREADS=1 .venv/bin/python -m pytest -q tests/model
"""

from __future__ import annotations

import multiprocessing
import os
import weakref
from collections.abc import Collection, Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from gemserve.contract.scores import AnswerAttention
from gemserve.engine.memory import Change, KVPlace, Stretch
from gemserve.engine.running.runner import Runner
from gemserve.engine.scheduling.pace import StepLimits
from gemserve.engine.sequence.step_plan import RunOutput, StepPlan, Task
from gemserve.model.adapter import NO_ADAPTER, Adapter
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.rope import RotaryFactory


def _without_memo(rotary: RotaryFactory) -> Any:
    """How it is pickled: what it remembers cannot be."""
    return RotaryFactory, (rotary._rotary,)


ForkingPickler.register(RotaryFactory, _without_memo)


def is_piped() -> bool:
    return os.environ.get("GEMSERVE_TEST_RUNNER") == "pipe"


class PipeRunner:
    """`Runner` with every call sent through a pipe. The other process has the same weights."""

    has_graphs = False

    def __init__(self, model: CausalModel, num_units: int, **settings: Any) -> None:
        # a fork has the weights already; threads of OpenMP would not survive it
        assert torch.get_num_threads() == 1, "set OMP_NUM_THREADS=1"
        self._pipe, theirs = multiprocessing.Pipe()
        context = multiprocessing.get_context("fork")
        process = context.Process(
            target=_serve, args=(theirs, self._pipe, model, num_units, settings), daemon=True
        )
        process.start()
        theirs.close()
        self._known: set[tuple[str, str]] = set()
        self.copies = PipeCopies(self)
        self.memory = PipeMemory(self)
        self._end = weakref.finalize(self, _end, self._pipe, process)

    def begin(self, task: Task, adapter: Adapter = NO_ADAPTER) -> None:
        grammar = task.request.grammar
        if grammar is not None:  # which is compiled anew there
            request = replace(task.request, grammar=replace(grammar, compiled=None))
            task = replace(task, request=request)
        self.call("begin", task, None if adapter is NO_ADAPTER else adapter)

    def run(self, plan: StepPlan, limits: StepLimits) -> RunOutput:
        out: RunOutput = self.call("run", plan, limits)
        return out

    def watched_answer(self, number: int, offsets: Sequence[int]) -> AnswerAttention | None:
        found: AnswerAttention | None = self.call("watched_answer", number, list(offsets))
        return found

    def forget(self, numbers: Collection[int]) -> None:
        self.call("forget", list(numbers))

    def change_memory(self, changes: Collection[Change]) -> None:
        if changes:
            self.call("change_memory", list(changes))

    def call(self, name: str, *arguments: Any) -> Any:
        """The result of a method there. Raises what it raises."""
        self._pipe.send((name, arguments))
        result = self._pipe.recv()
        if isinstance(result, Exception):
            raise result
        return result


class PipeCopies:
    """The other process's `PoolCopies`."""

    def __init__(self, runner: PipeRunner) -> None:
        self._runner = weakref.proxy(runner)
        self.dtype: str = runner.call("dtype")

    def take(
        self, stretches: Sequence[Stretch], num_units: int, start: int, count: int
    ) -> memoryview:
        return memoryview(self._runner.call("take", list(stretches), num_units, start, count))

    def put(self, place: KVPlace, num_units: int, start: int, data: bytes | bytearray) -> None:
        self._runner.call("put", place, num_units, start, bytearray(data))


class PipeMemory:
    """The other process's memory, to look at."""

    def __init__(self, runner: PipeRunner) -> None:
        self._runner = weakref.proxy(runner)

    @property
    def rows(self) -> torch.Tensor:
        """A copy of it, which is full of zeros at first."""
        rows: torch.Tensor = self._runner.call("rows")
        return rows


def _serve(
    pipe: Connection, parents: Connection, model: CausalModel, num_units: int, settings: Any
) -> None:
    parents.close()
    torch.set_num_threads(1)
    runner = Runner(model, num_units, **settings)
    runner.memory.rows.zero_()

    def answer(name: str, arguments: tuple[Any, ...]) -> Any:
        if name == "rows":
            return runner.memory.rows
        if name == "dtype":
            return runner.copies.dtype
        if name == "take":
            return bytes(runner.copies.take(*arguments))
        if name == "put":
            return runner.copies.put(*arguments)
        if name == "begin":
            task, adapter = arguments
            return runner.begin(task, NO_ADAPTER if adapter is None else adapter)
        return getattr(runner, name)(*arguments)

    while True:
        try:
            name, arguments = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            result = answer(name, arguments)
        except Exception as error:
            result = error.with_traceback(None)
        pipe.send(result)


def _end(pipe: Connection, process: Any) -> None:
    pipe.close()
    process.join(5)
