"""`ntk`: NTK-Attention, a term in every layer's softmax that acts like a long prefix."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from gemserve.adapters.tensor_checks import LARGEST, check_heads, take
from gemserve.cost import ModelShape
from gemserve.errors import AdapterError, shown
from gemserve.model.adapter import Adapter, AttentionOptions, StepTerms
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.rank_shard import RankShard
from gemserve_kernels import Backend, Partial, ntk_part
from gemserve_kernels.attention import sink_part

_TRIED = 7  # random queries for which a term is computed when it is loaded


class NTK(Adapter):
    """`z_a`: [layers, heads, r, s]; `z_b`: [layers, heads, s, head_dim]; `k`: [layers, heads, r].

    All are float32, one for each query head; see `gemserve_kernels.ntk_part`. `num_positions` is
    where the prompt starts. For a converted text, that is where the prompt would start after the
    text.
    """

    def __init__(
        self,
        name: str,
        version: str,
        *,
        z_a: torch.Tensor,
        z_b: torch.Tensor,
        k: torch.Tensor,
        num_positions: int = 0,
    ) -> None:
        super().__init__(name, version)
        self.z_a, self.z_b, self.k = z_a, z_b, k
        self.num_positions = num_positions

    @property
    def num_bytes(self) -> int:
        return sum(t.numel() * t.element_size() for t in (self.z_a, self.z_b, self.k))

    def part(
        self,
        layer: int,
        query: torch.Tensor,
        options: AttentionOptions,
        backend: Backend,
    ) -> Partial:
        return ntk_part(query, self.z_a[layer], self.z_b[layer], self.k[layer])

    def joined(
        self,
        layer: int,
        query: torch.Tensor,
        parts: Sequence[Partial],
        options: AttentionOptions,
        backend: Backend,
    ) -> torch.Tensor:
        z_a, z_b, k = self.z_a[layer], self.z_b[layer], self.k[layer]
        if options.sinks is not None:
            parts = [*parts, sink_part(options.sinks, query)]
        return backend.merge_ntk(parts, query, z_a, z_b, k)

    def step_terms(self) -> StepTerms:
        return StepTerms(z_a=self.z_a, z_b=self.z_b, k=self.k)

    def of_rank(self, shard: RankShard, rank: int) -> NTK:
        heads = shard.heads_of(rank)
        z_a, z_b, k = (t[:, heads].clone() for t in (self.z_a, self.z_b, self.k))
        return NTK(self.name, self.version, z_a=z_a, z_b=z_b, k=k, num_positions=self.num_positions)


def shapes(shape: ModelShape, r: int, s: int) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors.

    Raises `AdapterError` if φ is not defined for `r`, or the layers' heads differ in size.
    """
    check_heads("ntk", shape)
    if r not in (shape.head_dim, 2 * shape.head_dim):
        raise AdapterError(
            f"r={r}: must be the model's head_dim, {shape.head_dim}, or twice that, "
            f"{2 * shape.head_dim}"
        )
    lead = (shape.num_layers, shape.num_heads)
    return {"z_a": (*lead, r, s), "z_b": (*lead, s, shape.head_dim), "k": (*lead, r)}


def build(
    name: str,
    version: str,
    tensors: Mapping[str, torch.Tensor],
    settings: Mapping[str, object],
    model: CausalModel,
) -> NTK:
    """Build the adapter. Raises `AdapterError` if tensors or settings do not fit this model."""
    positions = settings.get("positions", 0)
    if type(positions) is not int or not 0 <= positions < model.context_tokens:
        raise AdapterError(
            f"positions={shown(positions)}: must be from 0 to {model.context_tokens - 1}"
        )
    z_a = tensors.get("z_a")
    r, s = z_a.shape[2:] if z_a is not None and z_a.dim() == 4 else (model.shape.head_dim, 1)
    taken = take(tensors, shapes(model.shape, r, s), torch.float32, model.device)
    adapter = NTK(name, version, **taken, num_positions=positions)
    _check_term(adapter)
    return adapter


def _check_term(adapter: NTK) -> None:
    """Raise `AdapterError` if the term overflows float32 for ordinary queries.

    Its tensors may be large by themselves: Z and k are multiples of attention's weight, and the
    output is their quotient. So the term is computed, for the query 0 and for random ones.
    """
    layers, heads, _, head_dim = adapter.z_b.shape
    generator = torch.Generator().manual_seed(0)
    queries = torch.randn(1, _TRIED, head_dim, generator=generator).expand(heads, -1, -1)
    queries = torch.cat([torch.zeros(heads, 1, head_dim), queries], 1).to(adapter.z_b)
    for layer in range(layers):
        part = ntk_part(queries, adapter.z_a[layer], adapter.z_b[layer], adapter.k[layer])
        assert part.mass is not None
        # attention to the text alone has a weight of about 1 or more
        outputs = part.out.abs() / (1 + part.mass)[..., None]
        largest = float((outputs + 0 * part.mass[..., None]).max())
        if not largest <= LARGEST:  # false for NaN, too
            raise AdapterError(
                f"layer {layer}: z_a, z_b and k give outputs of {largest:.3g} for ordinary "
                f"queries; squares of values above {LARGEST:.3g} overflow float32"
            )
