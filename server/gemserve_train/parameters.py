"""The trainable parameters of each kind of adapter."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from gemserve.adapters import ntk, prefix
from gemserve.adapters.activation import Activation
from gemserve.adapters.folder import write_folder
from gemserve.adapters.ntk import NTK
from gemserve.adapters.prefix import Prefix
from gemserve.cost import ModelShape
from gemserve.errors import AdapterError
from gemserve.model.adapter import Adapter
from gemserve.model.base_model import BaseModel
from gemserve.model.passes.causal_model import CausalModel
from gemserve_kernels import Partial
from gemserve_train.forward import logits_with_gradients

LARGEST_LSE = 80.0  # bound of a term's log weight: e to this power is still a float32
_FIRST_TEXTS = 16


class Parameters(nn.Module, ABC):
    """The parameters of one adapter in training. `settings` go into its description file."""

    kind: str
    settings: dict[str, Any]
    replacement: CausalModel | None = None  # the model to run in place of the base, if any

    @abstractmethod
    def adapter(self) -> Adapter:
        """The adapter with the present values, which pass gradients on."""

    @abstractmethod
    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors for the adapter's file."""

    def write(self, folder: Path, base: BaseModel) -> None:
        """Make `folder` an adapter for the model that `base` describes."""
        tensors = self.tensors()
        write_folder(folder, kind=self.kind, settings=self.settings, tensors=tensors, base=base)

    @property
    def num_parameters(self) -> int:
        return sum(p.numel() for p in self.parameters())


class NTKParameters(Parameters):
    """`k` is the softplus of a parameter, so that no denominator shrinks.

    Z_B starts at zero and k near it, so the untrained adapter changes almost nothing. `scale`:
    [layers, heads]; Z and k are multiples of it. Where attention's own weight e^ℓ is e^20, terms
    around 1 and their gradients would have no effect. `positions`: see `NTK`.
    """

    kind = "ntk"

    def __init__(
        self,
        shape: ModelShape,
        r: int,
        s: int,
        seed: int,
        *,
        scale: torch.Tensor | None = None,
        positions: int = 0,
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        sizes = ntk.shapes(shape, r, s)
        self.settings = {"r": r, "s": s, "positions": positions}
        self.z_a = nn.Parameter(torch.randn(sizes["z_a"], generator=generator) * r**-0.5)
        self.z_b = nn.Parameter(torch.zeros(sizes["z_b"]))
        self.log_k = nn.Parameter(torch.full(sizes["k"], -6.0))
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(sizes["k"][:2]) if scale is None else scale)

    @classmethod
    def beside(
        cls, model: CausalModel, texts: Sequence[Sequence[int]], r: int, s: int, seed: int
    ) -> NTKParameters:
        """Parameters whose scale is each head's attention weight.

        That is the median over the tokens of the first texts.
        """
        new = cls(model.shape, r, s, seed).to(model.device)
        by_layer: dict[int, list[torch.Tensor]] = {}

        def record(layer: int, query: torch.Tensor, text: Partial, term: Partial) -> None:
            by_layer.setdefault(layer, []).append(text.lse)

        with torch.no_grad():
            for ids in texts[:_FIRST_TEXTS]:
                logits_with_gradients(model, new.adapter(), torch.tensor([list(ids)]), record)
        for layer, weights in by_layer.items():
            typical = torch.cat(weights, 1).median(dim=1).values
            new.scale[layer] = typical.clamp_max(LARGEST_LSE).exp()
        return new

    def adapter(self) -> NTK:
        return NTK("", "", **self.tensors(), num_positions=self.settings["positions"])

    def tensors(self) -> dict[str, torch.Tensor]:
        scale = self.scale[..., None]
        k = scale * F.softplus(self.log_k)
        return {"z_a": self.z_a, "z_b": scale[..., None] * self.z_b, "k": k}


class PrefixParameters(Parameters):
    """Starts as the keys and values of `text`, tokens that the model has read.

    The parameters are at least float32: steps of a small rate would be lost in bfloat16.
    """

    kind = "prefix"

    def __init__(self, model: CausalModel, text: Sequence[int]) -> None:
        super().__init__()
        prefix.shapes(model.shape, len(text))  # these raise if the model can have no prefix
        prefix.check_windows(model)
        keys, values = read_prefix(model, text)
        self.settings = {"length": len(text)}
        self._dtype = model.dtype
        wide = torch.promote_types(model.dtype, torch.float32)
        self.keys, self.values = nn.Parameter(keys.to(wide)), nn.Parameter(values.to(wide))

    def adapter(self) -> Prefix:
        keys, values = self.keys.to(self._dtype), self.values.to(self._dtype)
        return Prefix("", "", keys=keys, values=values)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"keys": self.keys, "values": self.values}


class ActivationParameters(Parameters):
    kind = "activation"

    def __init__(self, shape: ModelShape, layer: int, dtype: torch.dtype = torch.float32) -> None:
        """`dtype`: that of the model's hidden states."""
        super().__init__()
        self._dtype = dtype
        if not 0 <= layer < shape.num_layers:
            raise AdapterError(f"layer={layer}: must be from 0 to {shape.num_layers - 1}")
        self.settings = {"layer": layer}
        self.vector = nn.Parameter(torch.zeros(shape.hidden_size))

    def adapter(self) -> Activation:
        return Activation("", "", vector=self.vector.to(self._dtype), layer=self.settings["layer"])

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"vector": self.vector}


def count_parameters(kind: str, shape: ModelShape, *, r: int, s: int, length: int) -> int:
    """The size of an adapter of this kind, but LoRA. Raises `AdapterError` for bad settings."""
    if kind == "activation":
        return shape.hidden_size
    sizes = ntk.shapes(shape, r, s) if kind == "ntk" else prefix.shapes(shape, length)
    return sum(int(torch.Size(size).numel()) for size in sizes.values())


@torch.inference_mode()
def _read(model: CausalModel, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    layers = model.num_layers
    memory = model.new_memory(2 * layers * len(ids))
    kv = memory.kv(0, num_layers=layers, capacity=len(ids))
    model.prefill_chunk(ids, start=0, kv=kv, rope_tokens=len(ids), is_last=False)
    pairs = [kv.read(layer, len(ids)) for layer in range(layers)]
    return torch.stack([k for k, _ in pairs]), torch.stack([v for _, v in pairs])


def read_prefix(model: CausalModel, ids: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of tokens at positions 0…: [layers, kv_heads, tokens, head_dim] each.

    As a prefix they are exactly these tokens before the prompt: their keys are already rotated.
    """
    keys, values = _read(model, ids)
    return keys.clone(), values.clone()  # a clone is no longer a tensor of inference mode
