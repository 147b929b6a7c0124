"""Describes the model that an adapter is for: architecture, shape, and some of its weights."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch

from gemserve.errors import shown
from gemserve.model.passes.causal_model import CausalModel
from gemserve_kernels.blocks import BlockWeight


@dataclass(frozen=True, slots=True, kw_only=True)
class BaseModel:
    """`weights` is a hash of some numbers of every weight. None fits any weights of this shape."""

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    hidden_size: int
    vocab_size: int
    weights: str | None = None

    def difference(self, other: BaseModel) -> str | None:
        """The first field that shows that the two are different models, with both values."""
        for name, ours in asdict(self).items():
            theirs = getattr(other, name)
            is_unknown = name == "weights" and None in (ours, theirs)
            if ours != theirs and not is_unknown:
                return f"{name} {shown(ours)}, not {shown(theirs)}"
        return None


def base_of(model: CausalModel) -> BaseModel:
    shape = model.shape
    return BaseModel(
        architecture=type(model.hf).__name__,
        num_layers=shape.num_layers,
        num_heads=shape.num_heads,
        num_kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        weights=hash_of(model),
    )


def hash_of(model: CausalModel) -> str:
    """The hash by which calibrations and adapters name a model's weights.

    It is that of the checkpoint, also if its weights were quantised when they were loaded.
    """
    if model.shard is not None:
        return model.shard.weights
    kept: str | None = getattr(model.hf, "weights_before", None)
    return kept or hash_weights(model.hf, rounded=True)


def hash_weights(hf: Any, *, rounded: bool = False) -> str:
    """A hash of about 64 numbers of every weight, converted to float32.

    The numbers are `rounded`, so that a model loaded as bfloat16 and as float32 has the same hash.
    """
    digest = hashlib.sha256()
    for name, parameter in sorted(hf.named_parameters()):
        weight = parameter.to_dense() if parameter.is_mkldnn else parameter  # packed for the CPU
        if hasattr(weight, "full_tensor"):  # a part of it; all ranks put theirs together
            weight = weight.full_tensor()
        step = max(1, weight.numel() // 64)
        if isinstance(weight, BlockWeight):
            some = weight.numbers_at(torch.arange(0, weight.numel(), step))
        else:
            some = weight.detach().flatten()[::step]
        if rounded:
            some = some.bfloat16()
        digest.update(f"{name} {tuple(parameter.shape)}".encode())
        digest.update(some.float().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def hash_norms(hf: Any) -> str | None:
    """A hash of the norms' weights, which files keep in full whatever the others are quantised to.

    So it is the same for all quantisations of a model, and for copies whose norms were not trained
    further. None: the model has no norms with weights, or none that training has changed.
    """
    return hash_norms_of(dict(hf.named_parameters()))


def hash_norms_of(parameters: Mapping[str, torch.Tensor]) -> str | None:
    """The same of parameters by their names in the model. None also if there are none."""
    digest, is_trained = hashlib.sha256(), False
    for name, parameter in sorted(parameters.items()):
        if "norm" in name and name.endswith(".weight") and parameter.dim() == 1:
            weight = parameter.detach().bfloat16().float().cpu()
            digest.update(f"{name} {tuple(parameter.shape)}".encode())
            digest.update(weight.numpy().tobytes())
            is_trained = is_trained or bool((weight != weight[0]).any())
    return digest.hexdigest()[:16] if is_trained else None


def hash_tokenizer(tokenizer: Any) -> str:
    """A hash of a tokenizer and its chat template."""
    digest = hashlib.sha256(tokenizer.backend_tokenizer.to_str().encode())
    digest.update(str(tokenizer.chat_template).encode())
    return digest.hexdigest()[:16]
