"""The runner of rank 0: it hands every call to the other ranks, too."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from dataclasses import replace

import torch

from gemserve.config import Switch
from gemserve.contract.scores import AnswerAttention
from gemserve.decoding.grammar import Grammars
from gemserve.engine.memory import Change
from gemserve.engine.ranks.lockstep import Leader
from gemserve.engine.ranks.ranks import Ranks
from gemserve.engine.ranks.summary import summary_of
from gemserve.engine.reuse.disk import HostCopies
from gemserve.engine.running.runner import Runner
from gemserve.engine.scheduling.pace import StepLimits
from gemserve.engine.sequence.step_plan import RunOutput, StepPlan, Task
from gemserve.model.adapter import NO_ADAPTER, Adapter
from gemserve.model.passes.causal_model import CausalModel

_HOST = torch.device("cpu")


class RankedRunner:
    """`Runner` on all ranks. Its results are rank 0's; the others must have come equally far."""

    has_graphs = False

    def __init__(
        self,
        ranks: Ranks,
        model: CausalModel,
        num_units: int,
        *,
        grammars: Grammars,
        end_ids: frozenset[int],
        cuda_graphs: Switch,
    ) -> None:
        assert model.shard is not None
        self._ranks, self._shard, self._device = ranks, model.shard, model.device
        ranks.send("start", num_units)
        self._runner = Runner(
            model,
            num_units,
            grammars=grammars,
            end_ids=end_ids,
            cuda_graphs=cuda_graphs,
            lockstep=Leader(ranks),
        )
        # rank 0's part of each adapter in use; the others keep theirs under the same number
        self._adapters = weakref.WeakKeyDictionary[Adapter, tuple[int, Adapter]]()
        self._num_adapters = 0
        self._dropped: list[int] = []

    @property
    def copies(self) -> HostCopies:
        return self._runner.copies

    def begin(self, task: Task, adapter: Adapter = NO_ADAPTER) -> None:
        with self._ranks.together():
            number, of_rank = self._known(adapter)
            self._runner.begin(task, of_rank)
            # the other ranks draw no tokens
            request = replace(task.request, grammar=None)
            self._ranks.send("begin", replace(task, request=request), number)

    def run(self, plan: StepPlan, limits: StepLimits) -> RunOutput:
        with self._ranks.together():
            self._ranks.send("run", plan, limits)
            out = self._runner.run(plan, limits)
            self._ranks.compare(summary_of(out))
        return out

    def watched_answer(self, number: int, offsets: Sequence[int]) -> AnswerAttention | None:
        raise AssertionError("refused: see `Core.check`")

    def forget(self, numbers: Collection[int]) -> None:
        with self._ranks.together():
            self._ranks.send("forget", tuple(numbers))
            self._runner.forget(numbers)

    def change_memory(self, changes: Collection[Change]) -> None:
        if not changes:
            return
        with self._ranks.together():
            self._ranks.send("change_memory", tuple(changes))
            self._runner.change_memory(changes)

    def _known(self, adapter: Adapter) -> tuple[int, Adapter]:
        """An adapter's number, 0 for none, and rank 0's part of it. The others get theirs once."""
        if adapter is NO_ADAPTER:
            return 0, adapter
        while self._dropped:
            self._ranks.send("drop_adapter", self._dropped.pop())
        known = self._adapters.get(adapter)
        if known is None:
            self._num_adapters += 1
            number = self._num_adapters
            self._ranks.send_each(
                lambda rank: ("keep_adapter", number, self._part(adapter, rank).moved(_HOST))
            )
            # a copy, because an entry must not hold its own key
            known = self._adapters[adapter] = number, self._part(adapter, 0).moved(self._device)
            weakref.finalize(adapter, self._dropped.append, number)
        return known

    def _part(self, adapter: Adapter, rank: int) -> Adapter:
        return adapter.of_rank(self._shard, rank)
