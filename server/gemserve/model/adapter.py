"""The interface of an adapter: what one sequence may change in a model's passes."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from gemserve.model.families.reach import ALL, Reach
from gemserve.model.rank_shard import RankShard
from gemserve_kernels import Backend, Partial, merge
from gemserve_kernels.attention import reference_attention, sink_part
from gemserve_kernels.cpu_step import LowRank


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionOptions:
    """How a layer attends: `scale` of its scores, `reach`, `softcap`, and `sinks`, [heads]."""

    scale: float
    reach: Reach = ALL
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTerms:
    """What an adapter adds to a decode step, for a step that does not run the layers.

    `shifts`: see `Adapter.shift`, by layer. `modules`: products of low rank, by the names of the
    model's modules. `keys`, `values`: a prefix, [layers, kv_heads, prefix, head_dim]. `z_a`, `z_b`,
    `k`: those of `ntk_part`, for all layers.
    """

    shifts: Mapping[int, torch.Tensor] = field(default_factory=dict)
    modules: Mapping[str, LowRank] = field(default_factory=dict)
    keys: torch.Tensor | None = None
    values: torch.Tensor | None = None
    z_a: torch.Tensor | None = None
    z_b: torch.Tensor | None = None
    k: torch.Tensor | None = None


class Adapter:
    """Changes to attention, to a layer's input, or to weights. An adapter is immutable.

    This one changes nothing; each kind of adapter overrides what it changes. `version`: that of the
    tensors loaded under `name`. `num_positions`: how many positions come before the first token.
    `replacement`: a model to run in place of the base, with which it shares all other weights.
    """

    num_positions: int = 0
    replacement: Any = None

    def __init__(self, name: str = "", version: str = "") -> None:
        self.name = name
        self.version = version

    @property
    def num_bytes(self) -> int:
        """Memory of its tensors."""
        return 0

    def part(
        self,
        layer: int,
        query: torch.Tensor,
        options: AttentionOptions,
        backend: Backend,
    ) -> Partial | None:
        """Attention of queries [heads, queries, head_dim] to what the adapter adds in `layer`."""
        return None

    def joined(
        self,
        layer: int,
        query: torch.Tensor,
        parts: Sequence[Partial],
        options: AttentionOptions,
        backend: Backend,
    ) -> torch.Tensor:
        """The attention output of a sequence's `parts` and the adapter, in the shape of `query`."""
        extra = self.part(layer, query, options, backend)
        if options.sinks is not None:
            parts = [*parts, sink_part(options.sinks, query)]
        return merge(parts if extra is None else [*parts, extra])

    def shift(self, layer: int) -> torch.Tensor | None:
        """The vector that is added to the input of `layer`: [hidden_size]."""
        return None

    def step_terms(self) -> StepTerms | None:
        """What it adds to a decode step. None: only the layers can compute that."""
        return None

    def of_rank(self, shard: RankShard, rank: int) -> Adapter:
        """What a rank needs of it. By default all; kinds with numbers of each head override it."""
        return self

    def moved(self, device: torch.device) -> Adapter:
        """The same adapter with its tensors on `device`."""
        clone = copy.copy(self)
        tensors = {name: t for name, t in vars(self).items() if isinstance(t, torch.Tensor)}
        for name, tensor in tensors.items():
            setattr(clone, name, tensor.to(device))
        return clone


NO_ADAPTER = Adapter()


def attend_all(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    options: AttentionOptions,
    backend: Backend,
) -> Partial:
    """Attention in which every query sees every key. Shapes are those of `Backend.part`."""
    if options.softcap is None:
        return backend.part(query, key, value, scale=options.scale, is_causal=False)
    return reference_attention(query, key, value, scale=options.scale, softcap=options.softcap)


class Shifted(nn.Module):
    """A decoder layer that adds `shift`, [rows, hidden_size] or [hidden_size], to its input."""

    def __init__(self, layer: nn.Module, shift: torch.Tensor) -> None:
        super().__init__()
        self.layer = layer
        self.shift = shift

    def forward(self, hidden_states: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        return self.layer(hidden_states + self.shift, *arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        """Read the wrapped layer's attributes: decoders look up their layers' kinds."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


def shifted_layers(layers: nn.ModuleList, adapters: Sequence[Adapter]) -> nn.ModuleList | None:
    """Layers that add the shifts of the rows' adapters, or None if there are no shifts.

    `adapters`: one for each row, or one for all.
    """
    if all(adapter is NO_ADAPTER for adapter in adapters):
        return None
    made: list[nn.Module] = []
    for index, layer in enumerate(layers):
        shifts = [adapter.shift(index) for adapter in adapters]
        known = next((shift for shift in shifts if shift is not None), None)
        if known is None:
            made.append(layer)
            continue
        rows = [torch.zeros_like(known) if shift is None else shift for shift in shifts]
        made.append(Shifted(layer, torch.stack(rows) if len(rows) > 1 else rows[0]))
    return (
        nn.ModuleList(made) if any(m is not o for m, o in zip(made, layers, strict=True)) else None
    )
