"""Recurrent and convolutional states of sequences, beside their keys and values.

Some layers mix tokens by no attention, or by other means beside it: short convolutions, Mamba, the
gated delta rule. Of all tokens before they keep a few tensors of a fixed size. transformers'
modules read and write these in its cache, for which `PassStates` stands in one pass.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch.nn import functional

from gemserve.errors import ModelError
from gemserve.model.passes.transfer import to_device


class StatePart(NamedTuple):
    """One of the tensors of a layer's state. `number`: the layer may have several of a kind."""

    layer: int
    kind: Literal["conv", "recurrent"]
    number: int


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The tensors of one sequence's state: shape and dtype of each."""

    parts: Mapping[StatePart, tuple[tuple[int, ...], torch.dtype]]

    @property
    def layers(self) -> frozenset[int]:
        """The layers that keep a state."""
        return frozenset(part.layer for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """Bytes of one sequence's state."""
        return sum(torch.Size(shape).numel() * d.itemsize for shape, d in self.parts.values())

    def in_float32(self) -> StateLayout:
        return StateLayout({part: (s, torch.float32) for part, (s, _) in self.parts.items()})


def find_states(model: Any) -> StateLayout:
    """The states that a causal LM of transformers keeps, from a pass over two tokens.

    Raises `ModelError` if layers keep a state elsewhere than in transformers' own cache.
    """
    from transformers import DynamicCache
    from transformers.cache_utils import LinearAttentionCacheLayerMixin

    class Recording(DynamicCache):
        """With the names of MiniMax's own cache, too."""

        def get_linear_cache(self, layer_idx: int) -> None:
            return None

        def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
            self.update_recurrent_state(linear_cache, layer_idx)

    try:
        cache = Recording(config=model.config)
    except Exception:  # no kinds of layers that transformers has caches for
        return StateLayout({})
    kept = {
        layer: of_layer
        for layer, of_layer in enumerate(cache.layers)
        if isinstance(of_layer, LinearAttentionCacheLayerMixin)
    }
    if not kept:
        return StateLayout({})
    config = model.config
    ids = torch.arange(2, device=next(model.parameters()).device)[None]
    before, config._attn_implementation = config._attn_implementation, "eager"
    try:
        with torch.inference_mode():
            model(input_ids=ids, position_ids=ids, past_key_values=cache, use_cache=False)
    except Exception as error:  # any model's code runs here
        if not _runs(model, ids):
            return StateLayout({})  # `find_reaches` says why
        raise ModelError(
            f"{type(model).__name__} cannot be served: its config has layers with a recurrent "
            "state, which they do not keep in transformers' cache "
            f"({type(error).__name__}: {error})"
        ) from error
    finally:
        config._attn_implementation = before
    parts: dict[StatePart, tuple[tuple[int, ...], torch.dtype]] = {}
    for layer, of_layer in kept.items():
        kinds: tuple[tuple[Literal["conv", "recurrent"], Any], ...] = (
            ("conv", of_layer.conv_states),
            ("recurrent", of_layer.recurrent_states),
        )
        for kind, tensors in kinds:
            for number, tensor in tensors.items():
                if tensor is not None:
                    part = StatePart(layer, kind, number)
                    parts[part] = tuple(tensor.shape[1:]), tensor.dtype
    return StateLayout(parts)


@torch.inference_mode()
def _runs(model: Any, ids: torch.Tensor) -> bool:
    """Does the model run without a cache?"""
    try:
        model(input_ids=ids, position_ids=ids, use_cache=False)
    except Exception:
        return False
    return True


@dataclass(frozen=True, slots=True)
class SequenceState:
    """The place of one sequence's state in `memory`. At position 0 there is none yet."""

    memory: StateMemory
    slot: int

    def give_back(self) -> None:
        """Overwrite the state with zeros, and let another sequence have its place."""
        self.memory.take_back(self.slot)


class StateMemory:
    """Room for the states of `count` sequences, set aside at once."""

    def __init__(self, layout: StateLayout, count: int, device: torch.device) -> None:
        self._device = device
        self._tensors = {
            part: torch.empty((count, *shape), dtype=dtype, device=device)
            for part, (shape, dtype) in layout.parts.items()
        }
        self._free = list(reversed(range(count)))

    def take(self) -> SequenceState:
        """A free place."""
        assert self._free, "more sequences than were counted on"
        return SequenceState(self, self._free.pop())

    def take_back(self, slot: int) -> None:
        assert slot not in self._free
        for tensor in self._tensors.values():
            tensor[slot].zero_()
        self._free.append(slot)

    def read(self, part: StatePart, slots: torch.Tensor) -> torch.Tensor:
        """A copy of one part of several sequences' states: [sequences, …]."""
        return self._tensors[part].index_select(0, slots)

    def write(self, part: StatePart, slots: torch.Tensor, rows: torch.Tensor) -> None:
        self._tensors[part].index_copy_(0, slots, rows)

    def kind_of(self, part: StatePart) -> tuple[int, torch.dtype]:
        """The last size of a part, and its dtype."""
        tensor = self._tensors[part]
        return tensor.shape[-1], tensor.dtype

    def slots_of(self, states: Sequence[SequenceState]) -> torch.Tensor:
        assert all(state.memory is self for state in states)
        return to_device([state.slot for state in states], torch.long, self._device)


class PassStates:
    """What layers have as transformers' cache in one pass: the states of the pass's sequences.

    `is_fresh`: the pass begins at position 0, so there is no state yet. `pause` is called before
    each layer. Layers change copies, which `commit` writes back at the pass's end. So a pass that
    fails, or is abandoned, leaves the states as they were, and can be repeated.
    """

    def __init__(
        self,
        states: Sequence[SequenceState],
        *,
        is_fresh: bool,
        pause: Callable[[], None] | None = None,
    ) -> None:
        self._memory = states[0].memory
        self._slots = self._memory.slots_of(states)
        self._is_fresh, self._pause = is_fresh, pause
        self._held: dict[StatePart, torch.Tensor] = {}

    def commit(self) -> None:
        """Write the states at the end of the pass."""
        for part, rows in self._held.items():
            self._memory.write(part, self._slots, rows)

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        if self._pause is not None:
            self._pause()
        return self._find(StatePart(layer_idx, "conv", state_idx))

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> torch.Tensor | None:
        return self._find(StatePart(layer_idx, "recurrent", state_idx))

    def update_conv_state(
        self, conv_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        """The inputs that a convolution needs for new ones, [sequences, channels, inputs].

        Those from before come first, or zeros if the new ones are too few at the beginning.
        """
        part = StatePart(layer_idx, "conv", state_idx)
        size, dtype = self._memory.kind_of(part)
        earlier = self._find(part)
        if earlier is None:
            whole = functional.pad(conv_states, (max(0, size - conv_states.shape[-1]), 0))
        else:
            whole = torch.cat([earlier, conv_states], dim=-1)
        self._held[part] = whole[..., -size:].to(dtype, copy=True)
        return whole

    def update_recurrent_state(
        self, recurrent_states: torch.Tensor, layer_idx: int, state_idx: int = 0, **_: Any
    ) -> torch.Tensor:
        part = StatePart(layer_idx, "recurrent", state_idx)
        # a copy, because it may be a view of the states after all pieces of a chunk
        self._held[part] = recurrent_states.to(self._memory.kind_of(part)[1], copy=True)
        return self._held[part]

    def get_linear_cache(self, layer_idx: int) -> torch.Tensor | None:
        """MiniMax's name for a recurrent state."""
        return self.get_recurrent_state(layer_idx)

    def set_linear_cache(self, layer_idx: int, linear_cache: torch.Tensor) -> None:
        self.update_recurrent_state(linear_cache, layer_idx)

    def is_recording_past(self, layer_idx: int) -> bool:
        """Whether a pass may be taken back token by token."""
        return False

    def update(
        self, key: torch.Tensor, value: torch.Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values as they are: gemserve's attention function stores them."""
        return key, value

    def _find(self, part: StatePart) -> torch.Tensor | None:
        """The copy of this pass, which layers may write to. None: there is no state yet."""
        if part not in self._held:
            if self._is_fresh:
                return None
            self._held[part] = self._memory.read(part, self._slots)
        return self._held[part]
