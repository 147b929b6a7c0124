"""Decode steps on a CPU in one call of C++, where there is a compiler.

The model's modules stay as they are: only their weights are read, where they are. Prompts are read
by transformers' layers as before. Rows with adapters and rows without run together.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch

from gemserve.config import Switch
from gemserve.errors import ConfigError
from gemserve.model.adapter import NO_ADAPTER, Adapter
from gemserve.model.cpu.step_weights import PARTS, StepWeights, find_weights
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.kv import DecodeBatch, DecodeStep
from gemserve_kernels.blocks import has_blocks
from gemserve_kernels.cpu_step import CpuStep, LowRank, PreparedTerms, RowTerms

log = logging.getLogger("gemserve.model")
_LENGTHS = (5, 23)  # tokens of the sequences that are tried when a model is loaded
# of the largest logit; bfloat16 keeps 8 bits, and the step rounds less often than the layers do
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}
_TOLERANCE_OF_BLOCKS = 0.2  # whose products round what they take to bytes
_MODULE = re.compile(r"model\.layers\.(\d+)\.(.+)")
_HEAD = "lm_head"


def with_cpu_step(model: CausalModel, choice: Switch) -> CausalModel:
    """The model with the step, if `choice` and the machine allow it. "auto": if possible.

    Raises `ConfigError` if `choice` is "on" and the step cannot be used.
    """
    if choice == "off" or (choice == "auto" and model.device.type != "cpu"):
        return model
    try:
        if model.device.type != "cpu":
            raise ValueError(f"the model is on {model.device}")
        step = ModelStep(model, find_weights(model))
        step.check(NO_ADAPTER, None)
    except (ValueError, RuntimeError, MemoryError) as error:  # also torch's, for want of memory
        if choice == "on":
            raise ConfigError(f"cpu_step=on: {error}") from error
        log.info("decode steps run layer by layer, which takes longer: %s", error)
        return model
    log.info("a decode step is one call of compiled code")
    return model.with_step(step)


class ModelStep:
    """One model's decode step: from ids and positions to logits. Several threads may use it."""

    def __init__(self, model: CausalModel, weights: StepWeights) -> None:
        """`model`: without a step. Raises `CannotCompile`, or `ValueError` with a reason."""
        self._model, self._weights = model, weights
        self._embed = model.hf.model.embed_tokens
        self._step = CpuStep(weights.sizes, weights.layers, weights.norm, weights.head, model.dtype)
        # adapters that were tried; None: only the layers can compute them
        self._known: WeakKeyDictionary[Adapter, PreparedTerms | None] = WeakKeyDictionary()
        self._known[NO_ADAPTER] = None

    def takes(self, adapter: Adapter) -> bool:
        """Whether the step can compute rows with this adapter.

        An adapter is tried first, against the layers, when it is met for the first time.
        """
        if adapter is NO_ADAPTER:
            return True
        if adapter not in self._known:
            self._known[adapter] = self._tried(adapter)
        return self._known[adapter] is not None

    def __call__(
        self, step: DecodeStep, rope_tokens: Sequence[int], adapters: Sequence[Adapter]
    ) -> torch.Tensor:
        """The logits [rows, vocab], float32. All adapters are taken."""
        return self._run(step, rope_tokens, [self._known[adapter] for adapter in adapters])

    def check(self, adapter: Adapter, terms: PreparedTerms | None) -> None:
        """Raise `ValueError` if the step's logits differ from the layers' on random tokens."""
        trial = _Trial(self._model, adapter)
        expected = trial.expected()
        numbers = torch.tensor(trial.numbers)
        step = DecodeStep.over(numbers, trial.memory, max(_LENGTHS) + 1)
        actual = self._run(step, trial.rope_tokens, [terms] * len(_LENGTHS))
        difference = float((expected - actual).abs().max())
        in_blocks = has_blocks(self._model.hf)
        tolerance = _TOLERANCE_OF_BLOCKS if in_blocks else _TOLERANCE[self._model.dtype]
        limit = tolerance * max(1.0, float(expected.abs().max()))
        if not difference <= limit:  # this also catches NaN
            raise ValueError(f"its logits differ by {difference:.3g}, the limit is {limit:.3g}")

    @torch.inference_mode()
    def _run(
        self,
        step: DecodeStep,
        rope_tokens: Sequence[int],
        terms: Sequence[PreparedTerms | None],
    ) -> torch.Tensor:
        weights = self._weights
        hidden = self._embed(step.ids)
        if weights.embedding != 1.0:
            hidden = hidden * weights.embedding
        rotary, kinds = self._model.rotary_of(rope_tokens), weights.rope_kinds
        pairs = [rotary(hidden, step.positions, *kind) for kind in zip(kinds)] or [
            rotary(hidden, step.positions)
        ]
        cos, sin = (torch.cat(numbers) for numbers in zip(*pairs, strict=True))
        if weights.family.has_half_angles:
            cos, sin = (torch.cat([half, half], dim=-1) for half in (cos, sin))
        logits = self._step(hidden[0], step.spans, cos, sin, terms, step.window_spans)
        if weights.logits != 1.0:
            logits.div_(weights.logits)
        cap = weights.cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def _tried(self, adapter: Adapter) -> PreparedTerms | None:
        try:
            terms = self._prepared(adapter)
            self.check(adapter, terms)
            return terms
        except (ValueError, RuntimeError, MemoryError) as error:  # also torch's, for want of memory
            log.info("adapter %r decodes layer by layer: %s", adapter.name, error)
            return None

    def _prepared(self, adapter: Adapter) -> PreparedTerms:
        """Raises `ValueError` if the step has no such adapters."""
        terms = adapter.step_terms()
        if terms is None:
            raise ValueError(f"the step has no {type(adapter).__name__} of this form")
        head, added = self._added(terms.modules)
        return self._step.prepared(
            RowTerms(
                shifts=terms.shifts,
                added=added,
                head=head,
                keys=terms.keys,
                values=terms.values,
                z_a=terms.z_a,
                z_b=terms.z_b,
                k=terms.k,
            )
        )

    def _added(
        self, modules: Mapping[str, LowRank]
    ) -> tuple[LowRank | None, dict[tuple[int, str], LowRank]]:
        """What is added to the head, and to the layers' matrices."""
        added: dict[tuple[int, str], LowRank] = {}
        head = None
        for name, term in modules.items():
            match = _MODULE.fullmatch(name)
            parts = PARTS.get(match[2]) if match else None
            if name == _HEAD:
                head = term
                continue
            if match is None or parts is None:
                raise ValueError(f"the step has no module {name}")
            layer = int(match[1])
            matrices = [getattr(self._weights.layers[layer], part) for part in parts]
            rows = term.b.split([matrix.outs for matrix in matrices])
            for part, b in zip(parts, rows, strict=True):
                added[layer, part] = LowRank(a=term.a, b=b, scale=term.scale)
        return head, added


class _Trial:
    """Two short sequences of an adapter, read by the layers, that are about to be decoded."""

    def __init__(self, model: CausalModel, adapter: Adapter) -> None:
        self._runs: CausalModel = adapter.replacement or model
        self._adapters = [adapter] * len(_LENGTHS)
        layers, room = model.num_layers, max(_LENGTHS) + 1
        # if rotation depends on length, the sequences are rotated differently
        self.rope_tokens = [room + adapter.num_positions, 2 * model.context_tokens]
        self.memory = model.new_memory(2 * layers * room * len(_LENGTHS))
        generator = torch.Generator().manual_seed(0)
        spans = []
        for index, length in enumerate(_LENGTHS):
            ids = torch.randint(0, model.vocab_size, (length,), generator=generator).tolist()
            kv = self.memory.kv(2 * layers * room * index, num_layers=layers, capacity=room)
            self._runs.prefill_chunk(
                ids,
                start=0,
                kv=kv,
                rope_tokens=self.rope_tokens[index],
                is_last=False,
                adapter=adapter,
            )
            spans.append(kv)
        self._batch = DecodeBatch(self.memory, spans, slots=_LENGTHS, positions=_LENGTHS)

    @property
    def numbers(self) -> list[int]:
        positions = [length + self._adapters[0].num_positions for length in _LENGTHS]
        return self._batch.numbers([1, 2], positions)

    def expected(self) -> torch.Tensor:
        """The layers' logits: [2, vocab]."""
        return self._runs.decode([1, 2], self._batch, self.rope_tokens, self._adapters)
