"""A transformers causal LM as the engine sees it: forward passes over one sequence's chunks."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from gemserve.errors import ModelError
from gemserve.model.kv import KVShape, KVSpan
from gemserve.model.rope import fixed_rotary, is_length_dependent
from gemserve.model.seam import (
    ATTENTION_NAME,
    FilterLayerReached,
    FilterTap,
    ForwardContext,
    register,
)
from gemserve_kernels import select_backend


class CausalModel:
    """Weights, geometry and the two passes: `filter_chunk` (lower layers) and `chunk` (all).

    Stateless between calls: everything about a sequence is in its `KVSpan` and `FilterTap`.
    """

    def __init__(self, model: Any) -> None:
        register()
        model.eval().requires_grad_(False)
        self.config: Any = model.config
        self.config._attn_implementation = ATTENTION_NAME
        self.hf = model
        self._path = _decoder_path(model, self.config.num_hidden_layers)
        self._decoder = _follow(model, self._path)
        self._rotary = getattr(self._decoder, "rotary_emb", None)
        parameter = next(model.parameters())
        self.device, self.dtype = parameter.device, parameter.dtype
        self.backend = select_backend(self.device)
        heads: int = self.config.num_attention_heads
        self.kv_shape = KVShape(
            num_layers=self.config.num_hidden_layers,
            num_kv_heads=getattr(self.config, "num_key_value_heads", None) or heads,
            head_dim=getattr(self.config, "head_dim", None) or self.config.hidden_size // heads,
            dtype=self.dtype,
        )
        self.vocab_size: int = self.config.vocab_size
        self.context_tokens: int = self.config.max_position_embeddings

    @property
    def num_layers(self) -> int:
        return self.kv_shape.num_layers

    def window_of(self, layer: int) -> int | None:
        """How many tokens back `layer` sees; None: all of them."""
        window: int | None = getattr(self.config, "sliding_window", None)
        kinds = getattr(self.config, "layer_types", None)
        is_windowed = kinds is None or kinds[layer] == "sliding_attention"
        return window if is_windowed else None

    def new_kv(self, *, num_layers: int, capacity: int) -> KVSpan:
        return KVSpan(self.kv_shape, num_layers=num_layers, capacity=capacity, device=self.device)

    @torch.inference_mode()
    def filter_chunk(self, ids: Sequence[int], *, start: int, kv: KVSpan, tap: FilterTap) -> None:
        """Run layers 0..r−1 on a chunk, and of layer r = `tap.layer` its q, k (v comes along)."""
        context = ForwardContext(kv=kv, start=start, backend=self.backend, tap=tap)
        decoder = self._lower_decoder(tap.layer, tap.num_tokens)
        try:
            decoder(**self._inputs(ids, start), context=context)
        except FilterLayerReached:
            return
        raise ModelError(f"{type(self._decoder).__name__}: layer {tap.layer} never attended")

    @torch.inference_mode()
    def chunk(
        self, ids: Sequence[int], *, start: int, kv: KVSpan, rope_tokens: int, is_last: bool
    ) -> torch.Tensor | None:
        """Run all layers on a chunk; returns its last token's logits [vocab] if `is_last`.

        `rope_tokens`: the sequence's final length, which fixes length-dependent rope.
        """
        context = ForwardContext(kv=kv, start=start, backend=self.backend)
        wanted = [len(ids) - 1] if is_last else []
        out = self._whole_model(rope_tokens)(
            **self._inputs(ids, start),
            context=context,
            # an index tensor: the integer 0 would mean "all of them"
            logits_to_keep=torch.tensor(wanted, dtype=torch.long, device=self.device),
        )
        return out.logits[0, 0].float() if is_last else None

    def _inputs(self, ids: Sequence[int], start: int) -> dict[str, Any]:
        positions = torch.arange(start, start + len(ids), device=self.device)
        return {
            "input_ids": torch.tensor([list(ids)], dtype=torch.long, device=self.device),
            "position_ids": positions[None],
            "use_cache": False,
        }

    def _decoder_replacements(self, num_tokens: int) -> dict[str, nn.Module]:
        if self._rotary is None or not is_length_dependent(self._rotary):
            return {}
        return {"rotary_emb": fixed_rotary(self._rotary, num_tokens)}

    def _lower_decoder(self, layer: int, num_tokens: int) -> nn.Module:
        layers = nn.ModuleList(list(self._decoder.layers)[: layer + 1])
        return _with_modules(
            self._decoder, {"layers": layers, **self._decoder_replacements(num_tokens)}
        )

    def _whole_model(self, num_tokens: int) -> nn.Module:
        replacements = self._decoder_replacements(num_tokens)
        if not replacements:
            return self.hf
        replaced = _with_modules(self._decoder, replacements)
        for depth in range(len(self._path) - 1, -1, -1):
            parent = _follow(self.hf, self._path[:depth])
            replaced = _with_modules(parent, {self._path[depth]: replaced})
        return replaced


def _with_modules(module: Any, replacements: dict[str, nn.Module]) -> Any:
    """A shallow copy of `module` with some children replaced; the original is untouched."""
    clone = copy.copy(module)
    clone._modules = {**module._modules, **replacements}
    return clone


def _decoder_path(model: nn.Module, num_layers: int) -> tuple[str, ...]:
    """Attribute names that lead from the model to the module that owns its layers."""
    for name, module in model.named_modules():
        layers = module._modules.get("layers")
        if isinstance(layers, nn.ModuleList) and len(layers) == num_layers:
            return tuple(name.split(".")) if name else ()
    raise ModelError(f"{type(model).__name__}: no list of {num_layers} decoder layers found")


def _follow(module: Any, path: tuple[str, ...]) -> Any:
    for name in path:
        module = getattr(module, name)
    return module
