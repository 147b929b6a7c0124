"""Floating-point operations and bytes of a model's passes, from its geometry alone.

The formulas are Theorem 9.3 of the GemFilter thesis with its constants written out. A
multiplication and an addition count as two operations. (The thesis prints 2mhd for the prompt
memory of standard attention. It lacks a factor n: it is 2mhnd.) Elementwise work (norms,
activations, softmax) is not counted.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from gemserve.errors import ConfigError
from gemserve.kv_layout import KVLayout


def filter_units(kv_index: int) -> int:
    """Units of one token in a filter pass: K and V below the filter layer, and that layer's keys.

    A unit is the keys, or the values, of one token in one layer. `kv_index`: that of the filter
    layer, see `ModelShape`.
    """
    return 2 * kv_index + 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A decoder's geometry.

    `num_kv_heads`, `head_dim`: of the KV memory, which is the same in all layers. If `is_padded`,
    some layer has fewer key heads, or smaller keys or values: its heads are repeated, and its keys
    and values end with zeros. `layer_params`: weights of one layer's matrices that a token is
    multiplied with; `qkv_params`: those of its query, key and value projections; `element_bytes`:
    size of one K or V number in the cache; `kv_layers`: the layers with keys and values, ascending;
    None: all. `limits`: the most tokens that a token sees in each layer, itself included, where
    None means all; 0: the layer has no attention. None: all layers see all tokens.
    `windowed_layers`: those with a sliding window, ascending, which need not keep what is before
    it.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    layer_params: int
    qkv_params: int
    element_bytes: int
    is_padded: bool = False
    kv_layers: tuple[int, ...] | None = None
    limits: tuple[int | None, ...] | None = None
    windowed_layers: tuple[int, ...] = ()

    def with_limits(
        self, limits: Sequence[int | None], windowed_layers: Iterable[int] = ()
    ) -> ModelShape:
        """The same shape with layers that see so much."""
        having = tuple(layer for layer, limit in enumerate(limits) if limit != 0)
        return replace(
            self,
            kv_layers=None if len(having) == len(limits) else having,
            limits=None if set(limits) == {None} else tuple(limits),
            windowed_layers=tuple(windowed_layers),
        )

    @property
    def seen(self) -> tuple[int | None, ...]:
        """The most tokens that a token sees in each layer: see `limits`."""
        return (None,) * self.num_layers if self.limits is None else self.limits

    @property
    def num_kv_layers(self) -> int:
        """How many layers have keys and values."""
        return self.num_layers if self.kv_layers is None else len(self.kv_layers)

    @property
    def has_all_keys(self) -> bool:
        """Whether all layers have keys and values."""
        return self.kv_layers is None

    def kv_index(self, layer: int) -> int:
        """How many layers below `layer` have keys and values: its own place among these."""
        return layer if self.kv_layers is None else bisect_left(self.kv_layers, layer)

    def kv_layout(self, *, saves: bool = False) -> KVLayout:
        """How sequences have their keys and values. `saves`: see `KVLayout`."""
        windowed = self.windowed_layers
        return KVLayout(
            growing=self.num_kv_layers - len(windowed),
            windowed=len(windowed),
            window=max((self.seen[layer] or 0 for layer in windowed), default=0),
            saves=saves and bool(windowed),
        )

    def kv_place(self, layer: int) -> tuple[bool, int]:
        """Whether the layer has a sliding window, and its place among those that are alike."""
        before = bisect_left(self.windowed_layers, layer)
        if before < len(self.windowed_layers) and self.windowed_layers[before] == layer:
            return True, before
        return False, self.kv_index(layer) - before

    @property
    def unit_bytes(self) -> int:
        """Bytes of the keys, or values, of one token in one layer."""
        return self.num_kv_heads * self.head_dim * self.element_bytes

    def attention(self, start: int, count: int, limit: int | None = None) -> float:
        """FLOPs of one layer's QKᵀ and PV for tokens start..start+count−1.

        Each of them sees the tokens before it and itself, but no more than `limit`.
        """
        rising = count if limit is None else min(count, max(0, limit - start))
        pairs = rising * start + rising * (rising + 1) / 2 + (count - rising) * (limit or 0)
        return self.pair() * pairs

    def pair(self) -> float:
        """FLOPs of one query and one key in one layer, in all heads."""
        return 4.0 * self.num_heads * self.head_dim

    def row(self, num_tokens: int) -> float:
        """FLOPs of one query row and the keys of `num_tokens` tokens in one layer, in all heads."""
        return 2.0 * self.num_heads * self.head_dim * num_tokens

    def layer(self, start: int, count: int) -> float:
        """FLOPs over a chunk of one whole layer that sees all tokens."""
        return 2.0 * self.layer_params * count + self.attention(start, count)

    def layers(self, start: int, count: int, num_layers: int) -> float:
        """FLOPs of the lowest `num_layers` layers over a chunk."""
        kinds = _kinds(self.limits, num_layers)
        attention = sum(many * self.attention(start, count, limit) for limit, many in kinds)
        return 2.0 * self.layer_params * count * num_layers + attention

    def filter_chunk(self, start: int, count: int, layer: int) -> float:
        """FLOPs of layers 0..layer−1, and of the projections of `layer`, over a chunk."""
        return self.layers(start, count, layer) + 2.0 * self.qkv_params * count

    def prefill_chunk(self, start: int, count: int) -> float:
        """FLOPs of all layers over a chunk, without the output head."""
        return self.layers(start, count, self.num_layers)

    def step_attention(self, num_tokens: int) -> float:
        """FLOPs of all layers' attention of one token that has `num_tokens` before it."""
        kinds = _kinds(self.limits, self.num_layers)
        return sum(many * self.attention(num_tokens, 1, limit) for limit, many in kinds)

    def head(self) -> float:
        """FLOPs of the logits of one token."""
        return 2.0 * self.hidden_size * self.vocab_size

    def filter_bytes(self, num_tokens: int, layer: int) -> int:
        """Bytes held while filtering: see `filter_units`."""
        return num_tokens * filter_units(self.kv_index(layer)) * self.unit_bytes

    def whole_bytes(self, num_tokens: int) -> int:
        """Bytes of K and V of `num_tokens` tokens in all layers, whatever these see."""
        return 2 * self.num_kv_layers * num_tokens * self.unit_bytes

    def kept_bytes(self, num_tokens: int, num_prompt: int = 0) -> int:
        """Bytes held while decoding: K and V of `num_tokens` tokens, or of the last ones in layers
        with a window.

        `num_prompt`: tokens of which these layers save ranges for other prompts.
        """
        layout = self.kv_layout(saves=num_prompt > 0)
        return layout.units(num_tokens, layout.room(num_tokens, num_prompt)) * self.unit_bytes


@lru_cache(maxsize=1024)
def _kinds(
    limits: tuple[int | None, ...] | None, num_layers: int
) -> tuple[tuple[int | None, int], ...]:
    """How many of the lowest `num_layers` layers see how much."""
    seen = (None,) * num_layers if limits is None else limits[:num_layers]
    return tuple(Counter(seen).items())


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightPlan:
    """Bytes of a model's weights, by where they are while it serves.

    `resident`: on the device for good; `fp8`: the filter pass's copies, also on the device;
    `places`: places on the device that layers from the host share; `host`: in host memory.
    """

    resident: int
    fp8: int
    places: int
    host: int

    @property
    def device(self) -> int:
        """All bytes on the device."""
        return self.resident + self.fp8 + self.places


def plan_weights(
    layer_bytes: Sequence[int],
    *,
    rest_bytes: int,
    fp8_bytes: int,
    offload_layers: int,
    num_places: int,
) -> WeightPlan:
    """Divide weights between device and host; the upper `offload_layers` are on the host.

    `rest_bytes`: embeddings, last norm and output head.
    """
    first = len(layer_bytes) - offload_layers
    upper = layer_bytes[first:]
    return WeightPlan(
        resident=rest_bytes + sum(layer_bytes[:first]),
        fp8=fp8_bytes,
        places=num_places * max(upper, default=0),
        host=sum(upper),
    )


def check_device_memory(total: int, weights: WeightPlan, kv_bytes: int) -> None:
    """Raise `ConfigError` if weights and KV memory cannot both be on a device of `total` bytes."""
    if weights.device + kv_bytes > total:
        raise ConfigError(
            f"kv_memory={kv_bytes}: with {weights.device} bytes of weights, {weights.fp8} of them "
            f"FP8 copies, more than the device's {total}; lower --kv-memory or raise "
            "--offload-layers"
        )
