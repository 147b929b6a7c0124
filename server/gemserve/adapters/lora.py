"""`lora`: low-rank changes to weights, through PEFT, on a second tree of modules over one model.

Requests without a LoRA adapter run on the first tree, in which nothing has changed; those of one
adapter run together, apart from others.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from gemserve.adapters.shapes import check_values
from gemserve.errors import AdapterError
from gemserve.model.adapter import Adapter
from gemserve.model.causal import CausalModel

_PREFIX = "base_model.model."
# Settings that change more than the matrices they are beside.
_UNSUPPORTED = (
    "modules_to_save",
    "layer_replication",
    "trainable_token_indices",
    "alora_invocation_tokens",
)


class Lora(Adapter):
    """`own`: the model with PEFT's layers in place of the ones it adapts."""

    def __init__(self, name: str, version: str, *, own: CausalModel, num_bytes: int) -> None:
        super().__init__(name, version)
        self.own = own
        self._num_bytes = num_bytes

    @property
    def num_bytes(self) -> int:
        return self._num_bytes


def build(
    name: str,
    version: str,
    tensors: Mapping[str, torch.Tensor],
    settings: Mapping[str, Any],
    model: CausalModel,
) -> Lora:
    """Raises `AdapterError` if PEFT is missing, or makes nothing of the file for this model."""
    try:
        from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
    except ImportError as error:
        raise AdapterError("type 'peft LORA': needs the package peft; pip install peft") from error
    for setting in _UNSUPPORTED:
        if settings.get(setting):
            raise AdapterError(f"{setting}={settings[setting]!r}: not supported")
    if settings.get("bias", "none") != "none":
        raise AdapterError(f"bias={settings['bias']!r}: not supported, must be 'none'")
    for key, tensor in tensors.items():
        check_values(key, tensor)
    weights = {key.removeprefix(_PREFIX): tensor for key, tensor in tensors.items()}
    tree = _shared_tree(model.hf)
    try:
        config = LoraConfig.from_peft_type(**{**settings, "inference_mode": True})
        inject_adapter_in_model(config, tree, low_cpu_mem_usage=False)
        expected = {k for k, _ in tree.named_parameters() if ".lora_" in k}
        found = set_peft_model_state_dict(tree, weights)
    except (ValueError, TypeError, RuntimeError, KeyError, AttributeError) as error:
        raise AdapterError(f"PEFT refuses it for this model: {error}") from error
    missing = sorted(key for key in found.missing_keys if key in expected)
    if missing or found.unexpected_keys:
        which = missing or sorted(found.unexpected_keys)
        fault = "missing" if missing else "not this model's"
        raise AdapterError(f"tensor {which[0]!r}: {fault}, and {len(which) - 1} more")
    tree.requires_grad_(False)
    tree.eval()
    added = [p.to(model.device, model.dtype) for k, p in tree.named_parameters() if ".lora_" in k]
    for module in tree.modules():  # to the base's device and type
        for part in ("lora_A", "lora_B"):
            if isinstance(layers := getattr(module, part, None), nn.ModuleDict):
                layers.to(device=model.device, dtype=model.dtype)
    return Lora(
        name,
        version,
        own=model.variant(tree),
        num_bytes=sum(p.numel() * p.element_size() for p in added),
    )


def _shared_tree(module: Any) -> Any:
    """A tree of modules of its own over the same parameters: replacing a module here is not seen
    there."""
    clone = copy.copy(module)
    clone._modules = {
        name: None if child is None else _shared_tree(child)
        for name, child in module._modules.items()
    }
    clone._parameters = dict(module._parameters)
    clone._buffers = dict(module._buffers)
    return clone
