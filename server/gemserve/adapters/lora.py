"""`lora`: low-rank changes to weights, through PEFT.

They are in a second tree of modules over the same weights. Requests without a LoRA adapter run on
the first tree, which is unchanged. Requests of one LoRA adapter run together, apart from others.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

import torch

from gemserve.adapters.tensor_checks import LARGEST, check_squares, check_values
from gemserve.errors import AdapterError, shown
from gemserve.model.adapter import Adapter, StepTerms
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.shared_tree import shared_tree
from gemserve_kernels.cpu_step import LowRank

_PREFIX = "base_model.model."
_ADDED = ".lora_"
_OUTER = ".lora_B.default.weight"
_INNER = (".lora_A.weight", ".lora_embedding_A")
# Settings that an adapter's config may have besides those that `_config` reads. They matter only in
# training, or say which weights there are, as the weights' names do. Other settings must be off.
_WITHOUT_EFFECT = frozenset(
    (
        *("peft_type", "peft_version", "auto_mapping", "base_model_name_or_path", "revision"),
        *("task_type", "inference_mode", "lora_dropout", "fan_in_fan_out", "target_modules"),
        *("exclude_modules", "layers_to_transform", "layers_pattern", "megatron_core"),
        *("loftq_config", "eva_config", "corda_config", "lora_ga_config", "qalora_group_size"),
    )
)
_READ = frozenset(
    (
        *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "use_dora"),
        *("init_lora_weights", "bias"),
    )
)
# Other values (pissa, olora, corda, loftq, …) change the base model's own weights.
_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
_MAX_CHARS = 500  # of PEFT's own message, which may list every tensor
_PATTERN = re.compile(r"[\w.^$\\-]+")  # a module's name; no pattern that could take long to match


class Lora(Adapter):
    """`replacement`: the model with PEFT's layers in place of the ones it adapts."""

    def __init__(
        self, name: str, version: str, *, replacement: CausalModel, num_bytes: int
    ) -> None:
        super().__init__(name, version)
        self.replacement = replacement
        self._num_bytes = num_bytes

    @property
    def num_bytes(self) -> int:
        return self._num_bytes

    def step_terms(self) -> StepTerms | None:
        """None if it is on other modules than linear layers, or is a DoRA."""
        from peft.tuners.lora import LoraLayer
        from peft.tuners.lora.layer import Linear

        modules: dict[str, LowRank] = {}
        for name, module in self.replacement.hf.named_modules():
            if not isinstance(module, LoraLayer):
                continue
            if type(module) is not Linear or module.lora_variant:
                return None
            (key,) = module.active_adapters
            a, b = module.lora_A[key], module.lora_B[key]
            if a.bias is not None or b.bias is not None:
                return None
            modules[name] = LowRank(a=a.weight, b=b.weight, scale=module.scaling[key])
        return StepTerms(modules=modules)


def build(
    name: str,
    version: str,
    tensors: Mapping[str, torch.Tensor],
    settings: Mapping[str, Any],
    model: CausalModel,
) -> Lora:
    """Build the adapter.

    Raises `AdapterError` if PEFT is missing or rejects the file for this model.
    """
    if model.shard is not None:
        raise AdapterError(
            f"type 'peft LORA': not with tensor_parallel={model.shard.num_ranks}: it changes "
            "weights that are divided among the ranks"
        )
    try:
        from peft import LoraConfig, inject_adapter_in_model, set_peft_model_state_dict
    except ImportError as error:
        raise AdapterError("type 'peft LORA': needs the package peft; pip install peft") from error
    weights = {
        key.removeprefix(_PREFIX): check_values(key, tensor, model.dtype)
        for key, tensor in tensors.items()
    }
    config = _config(settings, weights)
    _check_products(config, weights)
    tree = shared_tree(model.hf)
    try:
        # PEFT sizes its layers by the rank and the model, and only then looks at the tensors
        with torch.device("meta"):
            inject_adapter_in_model(LoraConfig(**config), tree, low_cpu_mem_usage=False)
        outcome = set_peft_model_state_dict(tree, weights, low_cpu_mem_usage=True)
    except Exception as error:  # PEFT raises errors of almost any type
        raise AdapterError(f"PEFT refuses it for this model: {str(error)[:_MAX_CHARS]}") from error
    added = {key: p for key, p in tree.named_parameters() if _ADDED in key}
    missing = sorted(key for key in outcome.missing_keys if key in added)
    if missing or outcome.unexpected_keys:
        which = missing or sorted(outcome.unexpected_keys)
        fault = "missing" if missing else "not this model's"
        raise AdapterError(f"tensor {shown(which[0])}: {fault}, and {len(which) - 1} more")
    for key, parameter in added.items():  # they are views of the file's bytes
        parameter.data = parameter.data.to(model.device, model.dtype, copy=True)
        if key.endswith(_OUTER) and model.device.type == "cpu":
            parameter.data = parameter.data.T.contiguous().T  # as the compiled step reads it
    tree.requires_grad_(False)
    tree.eval()
    return Lora(
        name,
        version,
        replacement=model.variant(tree),
        num_bytes=sum(p.numel() * p.element_size() for p in added.values()),
    )


def _config(settings: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The config for PEFT: checked settings that make it run, fetch or search for nothing.

    Raises `AdapterError`, naming the setting.
    """
    for key, value in settings.items():
        if key not in _READ | _WITHOUT_EFFECT and value not in (None, False, []):
            raise AdapterError(f"{repr(key[:100])[1:-1]}={shown(value)}: not supported")
    if settings.get("bias", "none") != "none":
        raise AdapterError(f"bias={shown(settings['bias'])}: not supported, must be 'none'")
    if settings.get("init_lora_weights") not in _INITS:
        raise AdapterError(
            f"init_lora_weights={shown(settings['init_lora_weights'])}: not supported: it changes "
            "the base's own weights; save it as a plain LoRA"
        )
    targets = {key.rsplit(_ADDED, 1)[0] for key in weights if _ADDED in key}
    if not targets:
        raise AdapterError(f"no tensor is a LoRA's: {shown(', '.join(sorted(weights)))}")
    inner = (t for key, t in weights.items() if key.endswith(_INNER) and t.dim() > 0)
    largest = max((len(t) for t in inner), default=0)
    alpha, ranks, alphas = (
        settings.get(key, default)
        for key, default in (("lora_alpha", 8), ("rank_pattern", None), ("alpha_pattern", None))
    )
    return {
        "r": _rank("r", settings.get("r", 8), largest),
        "lora_alpha": _scale("lora_alpha", alpha),
        "target_modules": sorted(targets),
        "rank_pattern": {
            key: _rank("rank_pattern", value, largest)
            for key, value in _by_module("rank_pattern", ranks).items()
        },
        "alpha_pattern": {
            key: _scale("alpha_pattern", value)
            for key, value in _by_module("alpha_pattern", alphas).items()
        },
        "use_rslora": bool(settings.get("use_rslora")),
        "use_dora": bool(settings.get("use_dora")),
        "init_lora_weights": False,  # the file has all weights
        "inference_mode": True,
    }


def _check_products(config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> None:
    """Raise `AdapterError` if what a module adds to its output overflows for an ordinary input.

    That is B·A·x · alpha / r for one random x of ±1, computed in float64.
    """
    for name, weight in weights.items():
        check_squares(name, weight)
    for name, outer in weights.items():
        inner = weights.get(name.replace("lora_B", "lora_A"))
        if "lora_B" not in name or inner is None or inner.dim() != 2 or outer.dim() != 2:
            continue
        if len(inner) != outer.shape[1]:
            continue  # PEFT says what is wrong with the shapes
        signs = torch.randint(0, 2, inner.shape[1:], generator=torch.Generator().manual_seed(0))
        hidden = inner.cpu().double() @ (2.0 * signs.double() - 1)
        scale = max(map(abs, (config["lora_alpha"], *config["alpha_pattern"].values())))
        largest = scale * float((outer.cpu().double() @ hidden).abs().max())
        limit = min(LARGEST, torch.finfo(outer.dtype).max)
        if largest / max(1, config["r"]) > limit:
            raise AdapterError(
                f"tensor {shown(name)}: with lora_alpha={shown(scale)} it adds "
                f"{largest / config['r']:.3g} to the output for inputs of ±1, above the limit of "
                f"{limit:.3g}"
            )


def _rank(name: str, value: object, largest: int) -> int:
    """The rank, which must be within the tensors' ranks."""
    if type(value) is not int or not 1 <= value <= largest:
        raise AdapterError(
            f"{name}={shown(value)}: must be from 1 to {largest}, the largest rank of its tensors"
        )
    return value


def _scale(name: str, value: object) -> float:
    try:
        if not isinstance(value, bool) and isinstance(value, (int, float)) and math.isfinite(value):
            return value
    except OverflowError:  # an integer that no float can be
        pass
    raise AdapterError(f"{name}={shown(value)}: must be a number")


def _by_module(name: str, value: object) -> dict[str, object]:
    if not value:
        return {}
    if not isinstance(value, dict) or not all(map(_PATTERN.fullmatch, value)):
        raise AdapterError(f"{name}={shown(value)}: must be an object, by names of modules")
    return value
