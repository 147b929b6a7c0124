"""A forward pass with gradients: the model with an adapter, over several sequences in one row.

Serving writes keys and values into memory and has no gradients. Here the same adapters are applied
to plain causal attention. Sequences are packed one behind the other, so none is padded, and what
all of them begin with is computed once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface

from gemserve.model.adapter import Adapter, AttentionOptions
from gemserve.model.families.reach import Reach
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.shape import decoder_path, follow, layers_of, list_name
from gemserve.model.shared_tree import shared_tree
from gemserve_kernels import Partial, merge, select_backend
from gemserve_kernels.attention import reference_attention, sink_part
from gemserve_train.examples import IGNORED, TrainingExample, pack

TRAINING_ATTENTION = "gemserve-training"
RecordAttention = Callable[[int, torch.Tensor, Partial, Partial], None]


@dataclass(frozen=True, slots=True)
class Layout:
    """A packed row: first `shared` tokens, then the other tokens of each sequence.

    Every sequence begins with the shared tokens, and `lengths` counts its tokens after them.
    """

    shared: int
    lengths: tuple[int, ...]

    @property
    def longest(self) -> int:
        return self.shared + max(self.lengths)

    def bounds(self) -> Iterator[tuple[int, int]]:
        """Where the tokens of each sequence are, without the shared ones."""
        start = self.shared
        for length in self.lengths:
            yield start, start + length
            start += length

    def positions(self, first: int) -> torch.Tensor:
        """The position of each token, counted from `first`: [tokens]."""
        tails = [torch.arange(self.shared, self.shared + length) for length in self.lengths]
        return first + torch.cat([torch.arange(self.shared), *tails])

    def visible(
        self, device: torch.device, reaches: Collection[Reach]
    ) -> dict[Reach, torch.Tensor]:
        """Which tokens each token sees in layers of each reach: [tokens, tokens], bool."""
        positions = self.positions(0).to(device)
        sequence = torch.zeros_like(positions)  # 0 for the shared tokens, which all others see
        for at, (start, stop) in enumerate(self.bounds(), 1):
            sequence[start:stop] = at
        is_seen = (sequence[None] == 0) | (sequence[None] == sequence[:, None])
        is_seen &= positions[None] <= positions[:, None]
        return {
            reach: is_seen & (positions[None] >= reach.first(positions)[:, None])
            for reach in reaches
        }


def packed_logits(
    base: CausalModel,
    adapter: Adapter,
    ids: torch.Tensor,
    layout: Layout,
    *,
    wanted: torch.Tensor | None = None,
    record: RecordAttention | None = None,
) -> torch.Tensor:
    """Logits of a packed row `ids`, [tokens], at the indices `wanted`: [wanted, vocab].

    They are at least float32. Without `wanted` they are those of every token. Gradients reach the
    adapter. `record` is called in every layer that the adapter changes. It gets the layer, the
    queries [heads, tokens, head_dim], and the parts of their attention: to their own sequence and
    to the adapter.
    """
    AttentionInterface.register(TRAINING_ATTENTION, training_attention)
    first = adapter.num_positions
    with base.attention_named(TRAINING_ATTENTION):
        out = base.with_adapter(adapter, first + layout.longest)(
            input_ids=ids.to(base.device)[None],
            position_ids=layout.positions(first).to(base.device)[None],
            use_cache=False,
            adapter=adapter,
            layout=layout,
            visible=layout.visible(base.device, set(base.reaches)),
            reaches=base.reaches,
            record=record,
            logits_to_keep=0 if wanted is None else wanted.to(base.device),
        )
    logits: torch.Tensor = out.logits[0]
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def logits_with_gradients(
    base: CausalModel,
    adapter: Adapter,
    input_ids: torch.Tensor,
    record: RecordAttention | None = None,
) -> torch.Tensor:
    """Logits of every token of sequences of one length: [batch, tokens, vocab].

    See `packed_logits`.
    """
    batch, tokens = input_ids.shape
    layout = Layout(0, (tokens,) * batch)
    logits = packed_logits(base, adapter, input_ids.flatten(), layout, record=record)
    return logits.view(batch, tokens, -1)


def answer_logits(
    model: CausalModel, adapter: Adapter, examples: Sequence[TrainingExample]
) -> list[torch.Tensor]:
    """The logits that predict the tokens of each example's answer: [tokens, vocab] each.

    The examples are one packed row.
    """
    row = pack(examples)
    shared, *lengths = row["layout"].tolist()
    wanted = (row["labels"][0, 1:] != IGNORED).nonzero().flatten()
    layout = Layout(shared, tuple(lengths))
    logits = packed_logits(model, adapter, row["input_ids"][0], layout, wanted=wanted)
    return list(logits.split([len(example.ids) - example.num_prompt for example in examples]))


def training_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    adapter: Adapter,
    layout: Layout,
    visible: Mapping[Reach, torch.Tensor],
    reaches: Sequence[Reach],
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    record: RecordAttention | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of each sequence, with the adapter's part, all differentiable.

    `query`: [1, heads, tokens, head_dim].
    """
    head_dim = query.shape[-1]
    scale = scaling if scaling is not None else head_dim**-0.5
    reach = reaches[module.layer_idx]
    options = AttentionOptions(scale=scale, reach=reach, softcap=softcap)
    q, k, v = query[0], key[0], value[0]
    shared, mask = layout.shared, visible[reach]

    def attend(start: int, stop: int, before: int) -> Partial:
        """Attention of tokens start..stop−1 to the first `before` ones and to themselves."""
        keys, values, seen = (
            torch.cat([t[:, :before], t[:, start:stop]], 1) for t in (k, v, mask[start:stop])
        )
        rows = q[:, start:stop]
        return reference_attention(rows, keys, values, scale=scale, mask=seen, softcap=softcap)

    if query.is_cuda:  # a few large products take less time than many small ones
        part = attend(0, q.shape[1], 0)
    else:
        parts = [attend(0, shared, 0)] if shared else []
        parts += [attend(start, stop, shared) for start, stop in layout.bounds()]
        part = Partial(torch.cat([p.out for p in parts], 1), torch.cat([p.lse for p in parts], 1))
    backend = select_backend(query.device, name="reference")
    extra = adapter.part(module.layer_idx, q, options, backend)
    if record is not None and extra is not None:
        record(module.layer_idx, q, part, extra)
    others = [] if s_aux is None else [sink_part(s_aux, q)]
    out = merge([part, *others] if extra is None else [part, *others, extra])
    return out.transpose(0, 1)[None], None


class Recomputed(nn.Module):
    """A decoder layer whose activations are not kept for the backward pass, but computed again."""

    def __init__(self, layer: nn.Module, model: CausalModel) -> None:
        super().__init__()
        self.layer = layer
        self._model = (model,)  # torch does not look for modules in a tuple

    def forward(self, hidden_states: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._run(hidden_states, *arguments, **keywords)
        return checkpoint(self._run, hidden_states, *arguments, use_reentrant=False, **keywords)

    def _run(self, *arguments: Any, **keywords: Any) -> Any:
        # the backward pass computes it again after the forward pass has named its attention
        with self._model[0].attention_named(TRAINING_ATTENTION):
            return self.layer(*arguments, **keywords)

    def __getattr__(self, name: str) -> Any:
        """Read the wrapped layer's attributes: decoders look up their layers' kinds."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


def recomputing(model: CausalModel) -> CausalModel:
    """The same model with gradient checkpointing in every layer."""
    tree = shared_tree(model.hf)
    decoder = follow(tree, decoder_path(tree, model.num_layers))
    layers = nn.ModuleList([Recomputed(layer, model) for layer in layers_of(decoder)])
    setattr(decoder, list_name(decoder), layers)
    return model.variant(tree)
