"""Random adapters for a model, strong enough that forgetting one shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from gemserve.adapters.folder import write_folder
from gemserve.model.base_model import BaseModel, base_of
from gemserve.model.passes.causal_model import CausalModel


def tensors(
    kind: str, model: CausalModel, seed: int = 0
) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """Tensors and settings of one of our kinds."""
    g = torch.Generator().manual_seed(seed)
    shape = model.shape
    lead = (shape.num_layers, shape.num_heads)
    r, s = 2 * shape.head_dim, 4
    if kind == "ntk":
        return {
            "z_a": torch.randn(*lead, r, s, generator=g) * 0.5,
            "z_b": torch.randn(*lead, s, shape.head_dim, generator=g),
            "k": torch.rand(*lead, r, generator=g),
        }, {}
    if kind == "prefix":
        one = (shape.num_layers, shape.num_kv_heads, 7, shape.head_dim)
        return {name: torch.randn(*one, generator=g) * 2 for name in ("keys", "values")}, {}
    assert kind == "activation"
    return {"vector": torch.randn(shape.hidden_size, generator=g)}, {"layer": 1}


def write(
    folder: Path,
    kind: str,
    model: CausalModel,
    seed: int = 0,
    base: BaseModel | None = None,
    made: dict[str, torch.Tensor] | None = None,
) -> Path:
    """One of our kinds; `made`: with these tensors."""
    random, settings = tensors(kind, model, seed)
    write_folder(
        folder, kind=kind, settings=settings, tensors=made or random, base=base or base_of(model)
    )
    return folder


def write_peft(folder: Path, hf: Any, kind: str, seed: int = 0) -> Any:
    """A PEFT checkpoint made by PEFT over `hf`, and the PEFT model itself."""
    from peft import PrefixTuningConfig

    if kind == "lora":
        return write_lora(folder, hf, seed, target_modules=["q_proj", "v_proj"])
    assert kind == "prefix"
    config = PrefixTuningConfig(num_virtual_tokens=5, task_type="CAUSAL_LM")
    return _save_peft(folder, hf, config, seed, scale=1.5)


def write_lora(folder: Path, hf: Any, seed: int = 0, **settings: Any) -> Any:
    from peft import LoraConfig

    config = LoraConfig(**{"r": 4, "task_type": "CAUSAL_LM", **settings})
    return _save_peft(folder, hf, config, seed, scale=0.3)


def _save_peft(folder: Path, hf: Any, config: Any, seed: int, scale: float) -> Any:
    from peft import get_peft_model

    torch.manual_seed(seed)
    model = get_peft_model(hf, config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn_like(parameter) * scale)
    model.save_pretrained(folder, safe_serialization=True, save_embedding_layers=False)
    return model.eval()
