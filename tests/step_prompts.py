"""Sequences for tests of the compiled decode step: the layers read them, the step goes on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gemserve.model.adapter import NO_ADAPTER, Adapter
from gemserve.model.cpu.packed_linear import can_pack, with_packed_linears
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.kv import DecodeBatch, KVSpan
from tests import models

needs_bfloat16 = pytest.mark.skipif(
    not can_pack(torch.device("cpu"), torch.bfloat16), reason="no bfloat16 in oneDNN"
)


def half_model() -> CausalModel:
    """A model in bfloat16 whose sizes fill whole blocks of packed weights."""
    torch.manual_seed(0)
    sizes: dict[str, Any] = models.SIZES | {"hidden_size": 128, "intermediate_size": 192}
    sizes["num_key_value_heads"] = 4
    config = LlamaConfig(**sizes)
    model = CausalModel(LlamaForCausalLM(config).to(torch.bfloat16).eval())
    return model.variant(with_packed_linears(model.hf))


class Prompts:
    """Sequences of these lengths, read by the layers, with room to decode.

    `adapters`: of each sequence. `room`: of each sequence, in tokens. `final`: their final lengths,
    on which the rotary embedding may depend.
    """

    def __init__(
        self,
        model: CausalModel,
        lengths: Sequence[int],
        adapters: Sequence[Adapter] = (),
        room: int = 1200,
        final: Sequence[int] = (),
    ) -> None:
        self.model, self.lengths, self.room = model, lengths, room
        self.adapters = list(adapters) or [NO_ADAPTER] * len(lengths)
        self.final = list(final) or [room] * len(lengths)
        self.units = 2 * model.num_layers * room
        self.memory = model.new_memory(self.units * len(lengths))
        self.memory.rows.fill_(math.nan)  # what was never written must not be read
        for index, length in enumerate(lengths):
            generator = torch.Generator().manual_seed(index)
            ids = torch.randint(3, model.vocab_size, (length,), generator=generator).tolist()
            for low in range(0, length, 256):
                self.layers_of(index).prefill_chunk(
                    ids[low : low + 256],
                    start=low,
                    kv=self.kv(index),
                    rope_tokens=self.final[index],
                    is_last=False,
                    adapter=self.adapters[index],
                )

    def kv(self, index: int) -> KVSpan:
        layers = self.model.num_layers
        return self.memory.kv(index * self.units, num_layers=layers, capacity=self.room)

    def decode(
        self,
        model: CausalModel,
        indices: Sequence[int] | None = None,
        tokens: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """The logits of one more token of each of these sequences, which is then forgotten."""
        chosen = range(len(self.lengths)) if indices is None else indices
        slots = [self.lengths[index] for index in chosen]
        batch = DecodeBatch(
            self.memory, [self.kv(index) for index in chosen], slots=slots, positions=slots
        )
        ids = [7 + index for index in chosen] if tokens is None else tokens
        adapters = [self.adapters[index] for index in chosen]
        return model.decode(ids, batch, [self.final[index] for index in chosen], adapters)

    def decode_ahead(self, model: CausalModel, index: int, tokens: Sequence[int]) -> torch.Tensor:
        """The logits of several tokens more of one sequence in one step, which are forgotten."""
        count = len(tokens)
        slots = [self.lengths[index] + ahead for ahead in range(count)]
        batch = DecodeBatch(self.memory, [self.kv(index)] * count, slots=slots, positions=slots)
        adapters = [self.adapters[index]] * count
        return model.decode(tokens, batch, [self.final[index]] * count, adapters)

    def by_layers(self) -> torch.Tensor:
        """The same by the layers, one sequence after the other."""
        rows = [self.decode(self.layers_of(i), [i]) for i in range(len(self.lengths))]
        return torch.cat(rows)

    def greedy(self, model: CausalModel, index: int, count: int) -> list[int]:
        """So many tokens of one sequence, each the likeliest one."""
        before, tokens = self.lengths, [7]
        try:
            for _ in range(count):
                logits = self.decode(model, [index], tokens[-1:])
                tokens.append(int(logits.argmax()))
                self.lengths = [length + (i == index) for i, length in enumerate(self.lengths)]
        finally:
            self.lengths = before
        return tokens[1:]

    def written(self, index: int) -> torch.Tensor:
        """What a step has stored for one sequence."""
        length, layers = self.lengths[index], range(self.model.num_layers)
        parts = [
            torch.stack([part[:, length] for part in self.kv(index).read(layer, length + 1)])
            for layer in layers
        ]
        return torch.stack(parts)

    def layers_of(self, index: int) -> CausalModel:
        """The model that computes a sequence layer by layer."""
        return self.adapters[index].replacement or self.model
