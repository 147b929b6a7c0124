"""Finds how far back each layer will attend, from a model without weights.

Its layers are not run, because some cannot be without numbers: only the masks that they would be
given are looked at. When the model is loaded, `reach` looks at what they really use.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from transformers import AttentionMaskInterface, DynamicCache

from gemserve.cost import ModelShape
from gemserve.errors import ModelError
from gemserve.model.families.reach import (
    ALL,
    NOTHING,
    REACH_ATTENTION,
    TOKENWISE_LAYERS,
    Reach,
    reach_of_mask,
    windowed_layers,
)
from gemserve.model.shape import decoder_path, follow, layers_of, list_name, shape_of
from gemserve.model.shared_tree import replaced

log = logging.getLogger("gemserve.loading")
_STATE_ONLY = ("conv", "linear_attention", *TOKENWISE_LAYERS)  # a config's types without attention


def planned_shape(model: Any, dtype: torch.dtype) -> ModelShape:
    """The shape of a causal LM on the meta device, with what its layers will see.

    If that cannot be found, all layers see all tokens, and a warning says so.
    """
    shape = shape_of(model, dtype)
    try:
        reaches = planned_reaches(model)
        return shape.with_limits([reach.limit for reach in reaches], windowed_layers(reaches))
    except ModelError as error:
        log.warning("%s; all layers count as seeing all tokens", error)
        return shape


def planned_reaches(model: Any) -> tuple[Reach, ...]:
    """How far back each layer of a model on the meta device will attend. Raises `ModelError`."""
    AttentionMaskInterface.register(REACH_ATTENTION, reach_of_mask)
    config = model.config
    decoder = follow(model, decoder_path(model, config.num_hidden_layers))
    before, config._attn_implementation = config._attn_implementation, REACH_ATTENTION
    try:
        stubs = _look(model, decoder, torch.device("meta"))
    except Exception:  # any model's code runs here
        try:  # the masks of Llama 4 are made with numbers that are where the tokens are
            stubs = _look(model, decoder, torch.device("cpu"))
        except Exception as error:
            raise ModelError(
                f"{type(model).__name__}: what its layers see cannot be found without weights "
                f"({type(error).__name__}: {error})"
            ) from error
    finally:
        config._attn_implementation = before
    kinds = getattr(config, "layer_types", None) or [""] * len(stubs)
    pairs = zip(stubs, kinds, strict=True)
    return tuple(NOTHING if kind in _STATE_ONLY else stub.reach for stub, kind in pairs)


@torch.inference_mode()
def _look(model: Any, decoder: Any, device: torch.device) -> list[_Masked]:
    """What stands for each layer, after a pass over two tokens on `device`."""
    stubs = [_Masked(layer) for layer in layers_of(decoder)]
    changes: dict[str, nn.Module] = {
        name: _Result(child, torch.empty(2, 1, 2, 1, device=device))  # a tensor, or a pair of them
        for name, child in decoder.named_children()
        if name.startswith("rotary") and not isinstance(child, (nn.ModuleDict, nn.ModuleList))
    }
    changes[list_name(decoder)] = nn.ModuleList([*stubs[:-1], _Last(stubs[-1])])
    if device.type == "cpu":
        embedded = torch.zeros(1, 2, model.config.hidden_size)
        changes["embed_tokens"] = _Result(decoder.embed_tokens, embedded)
    path = decoder_path(model, model.config.num_hidden_layers)
    changed = replaced(model, path, changes)
    # it looks at the numbers of tokens
    follow(changed, path).warn_if_padding_and_no_attention_mask = lambda *_: None
    ids = torch.zeros(1, 2, dtype=torch.long, device=device)
    arguments = {
        "input_ids": ids,
        "position_ids": ids,
        "past_key_values": DynamicCache(),  # with one, masks do not look at the positions' values
        "use_cache": False,
        "logits_to_keep": ids[0],  # with an integer Gemma 4 slices its masks
    }
    with suppress(_AllSeen):
        try:
            changed(**arguments)
        except ValueError:  # layers of some families return two things
            for stub in stubs:
                stub.returns_pair = True
            changed(**arguments)
    return stubs


class _InPlace(nn.Module):
    """In place of `module`, whose attributes it has."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)


class _Masked(_InPlace):
    """In place of a layer: remembers the mask that it would be given."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer)
        self.reach, self.returns_pair = ALL, False

    def forward(self, hidden_states: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        self.reach = next(_reaches_in([*arguments, *keywords.values()]), NOTHING)
        return (hidden_states, None) if self.returns_pair else hidden_states


def _reaches_in(arguments: list[Any]) -> Iterator[Reach]:
    for each in arguments:
        if isinstance(each, Mapping):
            yield from _reaches_in(list(each.values()))
        elif isinstance(each, Reach):
            yield each


class _AllSeen(Exception):
    """The last layer's mask is known, so the pass may end."""


class _Last(_InPlace):
    """In place of the last layer, and around what stands for it."""

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        self.module(*arguments, **keywords)
        raise _AllSeen


class _Result(_InPlace):
    """In place of a module whose result is not looked at, but must have some shape."""

    def __init__(self, module: nn.Module, result: torch.Tensor) -> None:
        super().__init__(module)
        self.result = result

    def forward(self, *arguments: Any, **keywords: Any) -> torch.Tensor:
        return self.result
