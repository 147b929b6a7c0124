"""Records decode steps as CUDA graphs, once for each batch size, and replays them.

A graph reads its inputs from the addresses at which it was recorded, so inputs are copied there. A
batch is padded to its size with empty sequences, which compute nothing and store nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from gemserve.errors import ConfigError
from gemserve.model.causal_model import CausalModel
from gemserve.model.kv import NUMBERS, DecodeBatch, DecodeStep, Memory
from gemserve.model.transfer import on_host
from gemserve.types import Switch

log = logging.getLogger("gemserve.model")
Step = Callable[[], None]
MOST_SEQUENCES = 256
_LEAST_LENGTH = 1024  # shorter sequences are one size


class DecodeGraphs:
    """Decode steps of a model's own weights over one memory, without adapters.

    `record` takes a step, may run it several times, and returns what runs it again. Steps differ in
    their number of sequences and, as the kernels cut long sequences into pieces, in their longest
    one's length: powers of two of both. A size is recorded when it is first met.
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
        # shared by all sizes, as one step runs at a time
        self._numbers = torch.zeros(most * NUMBERS, dtype=torch.long, device=model.device)
        self._logits = torch.zeros(most, model.vocab_size, device=model.device)

    def takes(self, num_sequences: int) -> bool:
        return num_sequences <= self._most and not self._is_broken

    @torch.inference_mode()
    def decode(self, ids: Sequence[int], batch: DecodeBatch) -> torch.Tensor:
        """As `CausalModel.decode`; the logits are overwritten by the next call.

        Raises what recording raises, and from then on takes nothing.
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
            step = DecodeStep.over(self._numbers[: size * NUMBERS], self._memory, longest)
            self._logits[:size].copy_(self._model.step_logits(step))

        try:
            # running it more than once does no harm: the same is stored at the same place
            return self._record(run)
        except Exception:
            self._is_broken = True
            log.warning("a decode step cannot be recorded: from now on none is", exc_info=True)
            raise


def build_graphs(model: CausalModel, memory: Memory, choice: Switch) -> DecodeGraphs | None:
    """`choice` "auto": graphs wherever they can be had.

    Raises `ConfigError` where they are "on" and cannot be had.
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
    if not model.is_rope_fixed:
        return "this model's rotary embedding depends on each sequence's length"
    return None


def _power_of_two(number: int) -> int:
    """The least that is not below `number`, which is at least 1."""
    return 1 << (number - 1).bit_length()


class CudaRecorder:
    """Records steps as CUDA graphs that share their memory: they run one after another."""

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, step: Step) -> Step:
        # first runs compile kernels and make workspaces, which no graph can hold
        beside, current = torch.cuda.Stream(), torch.cuda.current_stream()
        beside.wait_stream(current)
        with torch.cuda.stream(beside):
            for _ in range(2):
                step()
        current.wait_stream(beside)
        graph = torch.cuda.CUDAGraph()
        # thread-local: an adapter may be on its way to the device in another thread
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step()
        replay: Step = graph.replay
        return replay
