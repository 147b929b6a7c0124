"""LoRA in training, through PEFT, over the base model's own weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from gemserve.errors import AdapterError
from gemserve.model.adapter import NO_ADAPTER, Adapter
from gemserve.model.base_model import BaseModel
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.shared_tree import shared_tree
from gemserve_train.parameters import Parameters

DEFAULT_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
_IN_FILE = "base_model.model."  # what PEFT's files have before each name


class LoraParameters(Parameters):
    """Low-rank changes of all modules whose names end in one of `targets`, scaled by 2."""

    kind = "lora"

    def __init__(self, model: CausalModel, rank: int, targets: Sequence[str], seed: int) -> None:
        """Raises `AdapterError` if PEFT is missing or finds no such module."""
        super().__init__()
        try:
            from peft import LoraConfig, inject_adapter_in_model
        except ImportError as error:
            raise AdapterError("type lora: needs the package peft; pip install peft") from error
        self.settings = {"rank": rank, "targets": sorted(targets)}
        tree = shared_tree(model.hf)
        config = LoraConfig(
            r=rank, lora_alpha=2 * rank, target_modules=list(targets), task_type="CAUSAL_LM"
        )
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                inject_adapter_in_model(config, tree, low_cpu_mem_usage=False)
            except ValueError as error:
                raise AdapterError(f"targets {', '.join(targets)}: {error}") from error
        tree.eval()
        for parameter in tree.parameters():
            if parameter.requires_grad:  # small steps would be lost in bfloat16
                parameter.data = parameter.data.to(torch.promote_types(model.dtype, torch.float32))
        self._config = config
        self._named = {name: p for name, p in tree.named_parameters() if p.requires_grad}
        self.low_rank = nn.ParameterList(self._named.values())
        self.replacement = model.variant(tree)

    def adapter(self) -> Adapter:
        return NO_ADAPTER  # the changes are in the replacement

    def tensors(self) -> dict[str, torch.Tensor]:
        return {
            _IN_FILE + name.replace(".default.", "."): parameter
            for name, parameter in self._named.items()
        }

    def write(self, folder: Path, base: BaseModel) -> None:
        """Make `folder` a LoRA in PEFT's format, which PEFT reads, too."""
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "adapter_model.safetensors"
        packed = {name: t.detach().cpu().contiguous() for name, t in self.tensors().items()}
        save_file(packed, path, metadata={"format": "pt"})
        told: dict[str, Any] = self._config.to_dict()
        told |= {"target_modules": self.settings["targets"], "inference_mode": True}
        config = folder / "adapter_config.json"
        config.write_text(json.dumps(told, indent=2, sort_keys=True, default=str) + "\n")
        # safetensors lets the owner alone read the file
        path.chmod(config.stat().st_mode & 0o777)


def count_lora(model: Any, rank: int, targets: Sequence[str]) -> int:
    """The size of a LoRA for a transformers model, whose weights are not needed."""
    return sum(
        rank * (module.in_features + module.out_features)
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and name.rsplit(".", 1)[-1] in targets
    )
