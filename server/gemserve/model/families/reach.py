"""Finds how far back each layer of a model attends, from the masks that transformers makes for it.

A config's `sliding_window` is not enough: some layers ignore it, some have it in their mask only,
and some attend within chunks. So a model is run once on two tokens. Where transformers would build
a layer's mask, it gets a `Reach` instead, which the layer hands to its attention function.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface

from gemserve.cost import ModelShape
from gemserve.errors import ModelError
from gemserve.model.families.head_sizes import find_misfit
from gemserve.model.shape import decoder_path, follow, layers_of

REACH_ATTENTION = "gemserve-reach"
# arguments that change what a layer attends to, and that `attention` cannot take into account
UNSERVED_OPTIONS = ("sinks", "head_mask", "position_bias")
TOKENWISE_LAYERS = ("mlp", "moe")  # by their types in a config: no token sees another one
_FURTHEST = 1 << 15  # the last token whose mask is looked at in a layer that sees all tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What a token sees of those before it: the last `window` tokens, itself included, or those of
    its own chunk of `chunk` tokens, or all if both are None.
    """

    window: int | None = None
    chunk: int | None = None

    @property
    def limit(self) -> int | None:
        """The most tokens that a token sees. None: there is no limit."""
        return self.window if self.chunk is None else self.chunk

    def first(self, position: Any) -> Any:
        """The first token that the token at `position` sees, as an int or as a tensor of them."""
        if self.chunk is not None:
            return position // self.chunk * self.chunk
        if self.window is None:
            return position * 0
        first = position - self.window + 1
        return first.clamp_min(0) if isinstance(first, torch.Tensor) else max(0, first)

    def __str__(self) -> str:
        if self == NOTHING:
            return "nothing, because it has no attention"
        if self.chunk is not None:
            return f"chunks of {self.chunk} tokens"
        return "all tokens" if self.window is None else f"the last {self.window} tokens"


ALL = Reach()
NOTHING = Reach(window=0)  # of a layer without attention


def windowed_layers(reaches: Sequence[Reach]) -> list[int]:
    """The layers with a sliding window, which need nothing of what is before it.

    Chunks are not among them: where one begins depends on a token's position.
    """
    return [layer for layer, reach in enumerate(reaches) if reach.limit and reach.chunk is None]


class _OtherMask:
    """A mask that no `Reach` is for. It may be another module's, so only its use is an error."""


@dataclass(slots=True)
class _Probe:
    """What the layers of one pass hand to their attention function.

    `num_kv_heads`, `head_dim`: of the memory.
    """

    num_kv_heads: int
    head_dim: int
    reaches: dict[int, Reach] = field(default_factory=dict)


def find_reaches(
    model: Any, shape: ModelShape, state_layers: Collection[int] = ()
) -> tuple[Reach, ...]:
    """How far back each layer attends.

    `model`: a causal LM of transformers. `shape`: of what this process has of it. `state_layers`:
    those that keep a recurrent state, and may have no attention. Raises
    `ModelError` if a layer does not attend through transformers' attention interface, or attends
    to other tokens than a `Reach` can say.
    """
    AttentionInterface.register(REACH_ATTENTION, _record)
    AttentionMaskInterface.register(REACH_ATTENTION, reach_of_mask)
    config, num_layers = model.config, shape.num_layers
    probe = _Probe(shape.num_kv_heads, shape.head_dim)
    before = config._attn_implementation
    config._attn_implementation = REACH_ATTENTION
    name = type(model).__name__
    try:
        with torch.inference_mode():
            ids = torch.arange(2, device=next(model.parameters()).device)[None]
            # an index tensor, because with an integer Gemma 4 slices its masks
            arguments = {"position_ids": ids, "logits_to_keep": ids[0], "use_cache": False}
            model(input_ids=ids, context=probe, **arguments)
    except ModelError as error:
        raise ModelError(f"{name} cannot be served: {error}") from error
    except Exception as error:  # any model's code runs here
        what = (
            "its layers do not call transformers' attention interface as others do "
            f"({type(error).__name__}: {error})"
        )
        if Reach.__name__ in str(error):  # they took it for a tensor
            what = (
                "transformers computes its attention in the layers' own code, in place of which no "
                "other attention function can be set"
            )
        raise ModelError(f"{name} cannot be served: {what}") from error
    finally:
        config._attn_implementation = before
    kinds = getattr(config, "layer_types", None) or [None] * num_layers
    silent = [
        layer
        for layer in range(num_layers)
        if layer not in probe.reaches
        and layer not in state_layers
        and kinds[layer] not in TOKENWISE_LAYERS
    ]
    if silent:
        layer = layers_of(follow(model, decoder_path(model, num_layers)))[silent[0]]
        parts = ", ".join(dict.fromkeys(type(part).__name__ for part in layer.children()))
        raise ModelError(
            f"{name} cannot be served: layers {_listed(silent)} do not call transformers' "
            f"attention interface; layer {silent[0]} consists of {parts}. Attention of a model's "
            "own, and a recurrent state outside of transformers' cache, are not served, and there "
            "is no input for cross-attention"
        )
    if not probe.reaches:
        raise ModelError(f"{name} cannot be served: none of its layers has attention")
    return tuple(probe.reaches.get(layer, NOTHING) for layer in range(num_layers))


def _listed(layers: list[int]) -> str:
    shown = ", ".join(map(str, layers[:8]))
    return shown if len(layers) <= 8 else f"{shown} … ({len(layers)} in all)"


def reach_of_mask(
    *,
    mask_function: Callable[..., Any],
    device: torch.device,
    local_size: int | None = None,
    **_: Any,
) -> Reach | _OtherMask:
    """The reach that a mask of transformers is for. `local_size`: of a window or of a chunk."""
    device = torch.device("cpu") if device.type == "meta" else device
    if local_size is None:
        candidates, looked_at = [ALL], [0, 1, 5, _FURTHEST]
    else:
        candidates = [Reach(window=local_size), Reach(chunk=local_size)]
        nearby = (local_size * times + more for times in (1, 2, 3) for more in (-1, 0, 1, 5))
        looked_at = [0, *(p for p in nearby if p > 0)]
    for reach in candidates:
        if all(_is_mask_row(mask_function, device, reach, position) for position in looked_at):
            return reach
    return _OtherMask()


def _is_mask_row(
    mask_function: Callable[..., Any], device: torch.device, reach: Reach, position: int
) -> bool:
    """Does the token at `position` see just what `reach` says?"""
    first = reach.first(position)
    # what is far before the first visible token is left out: masks of large windows are large
    others = torch.arange(max(0, first - 64), position + 3, device=device)
    zero = torch.zeros((), dtype=torch.long, device=device)
    row = mask_function(zero, zero, zero + position, others)
    seen = torch.as_tensor(row).broadcast_to(others.shape)
    return bool((seen == ((others >= first) & (others <= position))).all())


def _record(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    *,
    context: _Probe | None = None,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """An attention function that attends to nothing, and records what it was called with."""
    what = f"{type(module).__name__} of layer {module.layer_idx}"
    if context is None:
        raise ModelError(f"{what} does not hand keyword arguments on to its attention function")
    for name in UNSERVED_OPTIONS:
        if others.get(name) is not None:
            raise ModelError(
                f"{what} gives its attention function the option {name!r}, which is not computed "
                "here"
            )
    misfit = find_misfit(query, key, value, context.num_kv_heads, context.head_dim)
    if misfit is not None:
        raise ModelError(f"{what} {misfit}")
    if isinstance(attention_mask, _OtherMask):
        raise ModelError(
            f"{what} has a mask that is neither causal nor a sliding window nor chunks"
        )
    if not isinstance(attention_mask, Reach):
        raise ModelError(f"{what} attends with a mask that it builds itself")
    if sliding_window is not None and attention_mask != Reach(window=sliding_window):
        raise ModelError(
            f"{what} has sliding_window={sliding_window}, but its mask shows {attention_mask}"
        )
    if module.layer_idx in context.reaches:
        raise ModelError(f"{what} attends twice, and the KV memory has one place for its keys")
    context.reaches[module.layer_idx] = attention_mask
    batch, heads, rows, _ = query.shape
    return query.new_zeros(batch, rows, heads, value.shape[-1]), None
