"""Records decode steps as CUDA graphs, once for each batch size, and replays them.

A graph reads its inputs from the addresses at which it was recorded, so inputs are copied there. A
batch is padded to its size with empty sequences, which compute nothing and store nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from gemserve.config import Switch
from gemserve.errors import ConfigError
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.kv import DecodeBatch, DecodeStep, Memory
from gemserve.model.passes.transfer import on_host

log = logging.getLogger("gemserve.model")
Step = Callable[[], None]
MOST_SEQUENCES = 256
_LEAST_LENGTH = 1024  # all shorter sequences share a size


class DecodeGraphs:
    """Decode steps of a model's own weights over one memory, without adapters.

    `record` takes a step, may run it several times, and returns a function that runs it again. A
    size is a number of sequences and a length of the longest one, both rounded up to powers of two.
    The length matters because kernels cut long sequences into pieces. A size is recorded on first
    use.
    """

    def __init__(
        self,
        model: CausalModel,
        memory: Memory,
        record: Callable[[Step], Step],
        *,
        most: int = MOST_SEQUENCES,
    ) -> None:
        assert most == _power_of_two(most)
        self._model, self._memory, self._record, self._most = model, memory, record, most
        self._steps: dict[tuple[int, int], Step] = {}
        self._is_broken = False
        # all sizes share these, because one step runs at a time
        count = most * memory.sequence_numbers
        self._numbers = torch.zeros(count, dtype=torch.long, device=model.device)
        self._logits = torch.zeros(most, model.vocab_size, device=model.device)

    def takes(self, num_sequences: int) -> bool:
        return num_sequences <= self._most and not self._is_broken

    @torch.inference_mode()
    def decode(self, ids: Sequence[int], batch: DecodeBatch) -> torch.Tensor:
        """Like `CausalModel.decode`, but the next call overwrites the logits.

        If recording fails, this raises the error, and from then on `takes` is False.
        """
        size = _power_of_two(len(ids))
        longest = max(_LEAST_LENGTH, _power_of_two(batch.longest))
        assert batch.memory is self._memory
        numbers = batch.numbers(ids, batch.positions, size)
        given = on_host(numbers, torch.long, self._model.device)
        self._numbers[: len(numbers)].copy_(given, non_blocking=True)
        if (size, longest) not in self._steps:
            self._steps[size, longest] = self._recorded(size, longest)
        self._steps[size, longest]()
        return self._logits[: len(ids)]

    def _recorded(self, size: int, longest: int) -> Step:
        def run() -> None:
            numbers = self._numbers[: size * self._memory.sequence_numbers]
            step = DecodeStep.over(numbers, self._memory, longest)
            self._logits[:size].copy_(self._model.step_logits(step))

        try:
            # a step may run more than once: it stores the same values in the same places
            return self._record(run)
        except Exception:
            self._is_broken = True
            log.warning("a decode step cannot be recorded: from now on none is", exc_info=True)
            raise


def build_graphs(model: CausalModel, memory: Memory, choice: Switch) -> DecodeGraphs | None:
    """Graphs as `choice` says. "auto": graphs if they can be used.

    Raises `ConfigError` if `choice` is "on" and they cannot be used.
    """
    obstacle = _find_obstacle(model)
    if choice == "on" and obstacle is not None:
        raise ConfigError(f"cuda_graphs=on: {obstacle}")
    if choice == "off" or obstacle is not None:
        return None
    return DecodeGraphs(model, memory, CudaRecorder())


def _find_obstacle(model: CausalModel) -> str | None:
    if model.device.type != "cuda":
        return f"the model is on {model.device}, and only a CUDA device has graphs"
    if not model.backend.is_recordable:
        return (
            f"attention backend {model.backend.name!r} decodes in plain torch, which cannot be "
            "recorded; another one can where triton is installed (pip install 'gemserve[cuda]')"
        )
    if model.num_host_layers:
        return "layers that rest on the host come to the device in every step"
    if model.has_states:
        return "layers of this model keep a recurrent state, which steps on graphs do not carry"
    if not model.is_rope_fixed:
        return "this model's rotary embedding depends on each sequence's length"
    return None


def _power_of_two(number: int) -> int:
    """The smallest power of two that is at least `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


class CudaRecorder:
    """Records steps as CUDA graphs that share memory, because they run one after another."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        # the first runs compile kernels and make workspaces, which a graph cannot record
        beside, current = torch.cuda.Stream(), torch.cuda.current_stream()
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            for _ in range(2):
                step()
        current.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # thread-local, because another thread may be copying an adapter to the device
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        replay: Step = graph.replay
        return replay
