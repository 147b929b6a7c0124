"""`prefix`: keys and values before the prompt's first token, as P-Tuning v2 and PEFT train them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from gemserve.adapters.tensor_checks import check_heads, check_squares, take
from gemserve.cost import ModelShape
from gemserve.errors import AdapterError, shown
from gemserve.model.adapter import Adapter, AttentionOptions, StepTerms, attend_all
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.rank_shard import RankShard
from gemserve_kernels import Backend, Partial


class Prefix(Adapter):
    """`keys`, `values`: [layers, kv_heads, prefix, head_dim] in the model's dtype.

    Attention uses the keys as they are, without RoPE. They take the first positions, and the
    prompt's tokens come after them.
    """

    def __init__(
        self, name: str, version: str, *, keys: torch.Tensor, values: torch.Tensor
    ) -> None:
        super().__init__(name, version)
        self.keys, self.values = keys, values
        self.num_positions = keys.shape[2]

    @property
    def num_bytes(self) -> int:
        return 2 * self.keys.numel() * self.keys.element_size()

    def part(
        self,
        layer: int,
        query: torch.Tensor,
        options: AttentionOptions,
        backend: Backend,
    ) -> Partial:
        return attend_all(query, self.keys[layer], self.values[layer], options, backend)

    def step_terms(self) -> StepTerms:
        return StepTerms(keys=self.keys, values=self.values)

    def of_rank(self, shard: RankShard, rank: int) -> Prefix:
        heads = shard.kv_heads_of(rank)
        keys, values = (tensors[:, heads].clone() for tensors in (self.keys, self.values))
        return Prefix(self.name, self.version, keys=keys, values=values)


def shapes(shape: ModelShape, length: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors. Raises `AdapterError` if the layers' heads differ in size."""
    check_heads("prefix", shape)
    one = (shape.num_layers, shape.num_kv_heads, length, shape.head_dim)
    return {"keys": one, "values": one}


def build(
    name: str, version: str, tensors: Mapping[str, torch.Tensor], model: CausalModel
) -> Prefix:
    """Build the adapter.

    Raises `AdapterError` if the tensors do not fit this model, or a sliding window would lose the
    prefix.
    """
    keys = tensors.get("keys")
    length = keys.shape[2] if keys is not None and keys.dim() == 4 else 1
    taken = take(tensors, shapes(model.shape, length), model.dtype, model.device)
    if length == 0 or length >= model.context_tokens:
        raise AdapterError(
            f"a prefix of {length} positions: must be from 1 to {model.context_tokens - 1}, what "
            "the model's context leaves room for"
        )
    check_windows(model)
    for tensor_name, tensor in taken.items():
        check_squares(tensor_name, tensor)
    return Prefix(name, version, **taken)


def check_windows(model: CausalModel) -> None:
    """Raise `AdapterError` if a sliding window would lose a prefix."""
    windows = [w for w in map(model.window_of, range(model.num_layers)) if w is not None]
    if windows:
        raise AdapterError(
            f"type 'prefix': not for this model: {len(windows)} of its layers see only the last "
            f"{min(windows)} tokens, and would lose the prefix"
        )


def from_peft(tensors: Mapping[str, torch.Tensor], shape: ModelShape) -> dict[str, torch.Tensor]:
    """Convert a PEFT checkpoint's one tensor [prefix, 2 · layers · kv_heads · head_dim]."""
    packed = tensors.get("prompt_embeddings")
    width = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim
    if packed is None or len(tensors) != 1:
        raise AdapterError(
            "a PEFT prefix has one tensor, 'prompt_embeddings'; this file has "
            f"{shown(', '.join(sorted(tensors))) if tensors else 'none'}"
        )
    if packed.dim() != 2 or packed.shape[1] != width:
        raise AdapterError(
            f"tensor 'prompt_embeddings': has shape {shown(list(packed.shape))}, the base model "
            f"needs [prefix, {width}]"
        )
    by_layer = packed.view(-1, 2 * shape.num_layers, shape.num_kv_heads, shape.head_dim)
    pairs = by_layer.permute(1, 2, 0, 3)  # [2 · layers, kv_heads, prefix, head_dim]
    return {"keys": pairs[0::2].contiguous(), "values": pairs[1::2].contiguous()}
