"""Keeps the weights of upper layers in host memory and copies them to the device when needed.

A filter pass runs lower layers only. So while prompts are filtered the device holds only those, and
two places that the upper layers share. Layer i computes in place i mod 2, while the weights of the
next layer are copied to the other place.

No pass owns a place. A pass may pause inside a layer. When it is resumed, it copies its layer's
weights again if another pass has used the place. So a pass that ends early has nothing to release.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import nn

from gemserve.model.shared_tree import shared_tree

NUM_PLACES = 2
_ALIGNMENT = 256  # bytes; the alignment that the allocator gives to a separate weight


class HostLayers:
    """The weights of layers `first`…, and the places where they are used. For one thread.

    Weights are moved out of `layers`: their parameters become views of host memory, which is pinned
    if `device` is a GPU. Their buffers move to the device for good.
    """

    def __init__(self, layers: Sequence[nn.Module], first: int, device: torch.device) -> None:
        self.first = first
        self._is_gpu = device.type == "cuda"
        self._resting = {
            index: _pack(layer, self._is_gpu)
            for index, layer in enumerate(layers)
            if index >= first
        }
        size = max(weights.numel() for weights in self._resting.values())
        self._places = [
            torch.empty(size, dtype=torch.uint8, device=device) for _ in range(NUM_PLACES)
        ]
        self._held: list[int | None] = [None] * NUM_PLACES
        if self._is_gpu:
            self._stream = torch.cuda.Stream(device)
            self._arrived = [torch.cuda.Event() for _ in range(NUM_PLACES)]
        for layer in layers[first:]:
            for module in layer.modules():
                for name, buffer in module._buffers.items():
                    module._buffers[name] = None if buffer is None else buffer.to(device)

    def bind(self, layers: Sequence[nn.Module]) -> nn.ModuleList:
        """`layers`, or another tree over the same weights, in a form that a pass can run."""
        bound: list[nn.Module] = list(layers[: self.first])
        for index, layer in enumerate(layers[self.first :], self.first):
            tree, place = shared_tree(layer), self._places[index % NUM_PLACES]
            for module in tree.modules():
                for name, weight in module._parameters.items():
                    module._parameters[name] = self._used(index, weight, place)
            bound.append(Visiting(tree, self, index))
        return nn.ModuleList(bound)

    def expect(self) -> None:
        """Start to copy the first upper layers while the lower layers compute."""
        for layer in range(self.first, self.first + NUM_PLACES):
            self._fetch(layer)

    def bring(self, layer: int) -> None:
        """Make all further computation wait for the weights of `layer`."""
        self._fetch(layer)
        if self._is_gpu:
            place = self._places[0]
            torch.cuda.current_stream(place.device).wait_event(self._arrived[layer % NUM_PLACES])

    def follow(self, layer: int) -> None:
        """Start to copy the layer after `layer`, which is about to compute."""
        self._fetch(layer + 1)

    def _fetch(self, layer: int) -> None:
        index = layer % NUM_PLACES
        if layer in self._resting and self._held[index] != layer:
            self._held[index] = None  # in case the copy fails
            self._copy(layer, index)
            self._held[index] = layer

    def _copy(self, layer: int, index: int) -> None:
        weights = self._resting[layer]
        place = self._places[index][: weights.numel()]
        if not self._is_gpu:
            place.copy_(weights)
            return
        # earlier work may still be computing with the layer that is there now
        self._stream.wait_stream(torch.cuda.current_stream(place.device))
        with torch.cuda.stream(self._stream):
            place.copy_(weights, non_blocking=True)
            self._arrived[index].record(self._stream)

    def _used(
        self, layer: int, weight: nn.Parameter | None, place: torch.Tensor
    ) -> nn.Parameter | None:
        """A view of the place, for a weight in host memory.

        Any other weight is returned as it is.
        """
        resting = self._resting[layer]
        if weight is None or weight.untyped_storage().data_ptr() != resting.data_ptr():
            return weight
        offset = int(weight.storage_offset()) * weight.element_size()
        return nn.Parameter(_view(place, offset, weight), requires_grad=False)


class Visiting(nn.Module):
    """A decoder layer whose weights are copied to place `index` mod 2 when it needs them."""

    def __init__(self, layer: nn.Module, host: HostLayers, index: int) -> None:
        super().__init__()
        self.layer = layer
        self._host, self._index = host, index

    def forward(self, hidden_states: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        self._host.bring(self._index)
        self._host.follow(self._index)
        context = keywords.get("context")
        if context is not None:
            keywords["context"] = replace(context, pause=partial(self._pause, context.pause))
        return self.layer(hidden_states, *arguments, **keywords)

    def _pause(self, pause: Callable[[], None]) -> None:
        pause()
        self._host.bring(self._index)

    def __getattr__(self, name: str) -> Any:
        """Read the wrapped layer's attributes: decoders look up their layers' kinds."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("layer"), name)


def _pack(layer: nn.Module, is_pinned: bool) -> torch.Tensor:
    """Pack all weights of a layer into one piece of host memory: [bytes].

    The weights become views of it.
    """
    offsets: dict[nn.Parameter, int] = {}
    size = 0
    for weight in layer.parameters():
        offsets[weight] = size
        size += -(-weight.nbytes // _ALIGNMENT) * _ALIGNMENT
    packed = torch.empty(size, dtype=torch.uint8, pin_memory=is_pinned)
    for weight, offset in offsets.items():
        view = _view(packed, offset, weight)
        view.copy_(weight.detach())
        weight.data = view
    return packed


def _view(packed: torch.Tensor, offset: int, like: torch.Tensor) -> torch.Tensor:
    return packed[offset : offset + like.nbytes].view(like.dtype).view(like.shape)
