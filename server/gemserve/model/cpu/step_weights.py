"""Finds a model's weights for the compiled decode step, in the modules of its family."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from gemserve.model.cpu.packed_linear import PackedLinear
from gemserve.model.families.reach import Reach
from gemserve.model.passes.causal_model import CausalModel
from gemserve_kernels.cpu_step import ExpertWeights, LayerWeights, LinearWeight, StepSizes


@dataclass(frozen=True, slots=True, kw_only=True)
class StepFamily:
    """What is special about a family beside the modules that its layers have.

    `has_offset_norms`: norms multiply by 1 + weight. `has_softcap`: scores are soft-capped as the
    config says. `has_half_angles`: cosines and sines are given for half of the rotated numbers.
    """

    has_offset_norms: bool = False
    has_softcap: bool = False
    has_half_angles: bool = False


FAMILIES = {
    "gemma": StepFamily(has_offset_norms=True),
    "gemma2": StepFamily(has_offset_norms=True, has_softcap=True),
    "gemma3_text": StepFamily(has_offset_norms=True),
    "gpt_oss": StepFamily(has_half_angles=True),
    "granite": StepFamily(),
    "llama": StepFamily(),
    "ministral": StepFamily(),
    "mistral": StepFamily(),
    "mixtral": StepFamily(),
    "olmo2": StepFamily(),
    "olmo3": StepFamily(),
    "olmoe": StepFamily(),
    "phi3": StepFamily(),
    "qwen2": StepFamily(),
    "qwen3": StepFamily(),
    "qwen3_moe": StepFamily(),
    "seed_oss": StepFamily(),
    "smollm3": StepFamily(),
}
# by the names of a layer's modules, the matrices that are in them, one after the other
PARTS = {
    "self_attn.q_proj": ("query",),
    "self_attn.k_proj": ("key",),
    "self_attn.v_proj": ("value",),
    "self_attn.qkv_proj": ("query", "key", "value"),
    "self_attn.o_proj": ("out",),
    "mlp.gate_proj": ("gate",),
    "mlp.up_proj": ("up",),
    "mlp.gate_up_proj": ("gate", "up"),
    "mlp.down_proj": ("down",),
}
ACTIVATIONS = {"SiLU": "silu", "SiLUActivation": "silu", "GELUTanh": "gelu_tanh"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepWeights:
    """What the step needs of a model. `rope_kinds`: of layers that are rotated differently.

    `cap`: soft cap of the logits, or None. `embedding`: times the embeddings. `logits`: the logits
    are divided by it.
    """

    sizes: StepSizes
    layers: Sequence[LayerWeights]
    norm: torch.Tensor
    head: LinearWeight
    family: StepFamily
    rope_kinds: Sequence[str]
    cap: float | None
    embedding: float = 1.0
    logits: float = 1.0


def find_weights(model: CausalModel) -> StepWeights:
    """Raises `ValueError` with the reason if the step is not for this model."""
    config, shape = model.config, model.shape
    family = FAMILIES.get(config.model_type)
    if family is None:
        raise ValueError(f"not for models of type {config.model_type}")
    decoder = model.hf.model
    if getattr(config, "clip_qkv", None) is not None:
        raise ValueError("not for models that clip queries, keys and values")
    if any(reach.chunk for reach in model.reaches):
        raise ValueError("not for layers that attend within chunks")
    rope_kinds = _rope_kinds(decoder)
    reader = _Reader(model, family, rope_kinds)
    layers = [reader.layer(*pair) for pair in zip(decoder.layers, model.reaches, strict=True)]
    gates = [layer.gate.outs for layer in layers if layer.gate is not None]
    first = decoder.layers[0].self_attn
    sizes = StepSizes(
        hidden=config.hidden_size,
        inner=max(gates, default=0),
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        rotated=_rotated(model, rope_kinds) * (2 if family.has_half_angles else 1),
        eps=config.rms_norm_eps,
        scale=first.scaling,
        softcap=(first.attn_logit_softcapping or 0.0) if family.has_softcap else 0.0,
        residual=getattr(config, "residual_multiplier", 1.0),
        activation=_activation(decoder.layers),
    )
    return StepWeights(
        sizes=sizes,
        layers=layers,
        norm=reader.norm(decoder.norm),
        head=_linear(model.hf.lm_head),
        family=family,
        rope_kinds=rope_kinds,
        cap=getattr(config, "final_logit_softcapping", None),
        embedding=getattr(config, "embedding_multiplier", 1.0),
        logits=getattr(config, "logits_scaling", 1.0),
    )


def _rope_kinds(decoder: Any) -> list[str]:
    """The kinds of layers that are rotated differently. Empty: all are rotated alike."""
    kinds = getattr(decoder.rotary_emb, "layer_types", None)
    return [] if kinds is None else list(kinds)


def _rotated(model: CausalModel, rope_kinds: Sequence[str]) -> int:
    """How many cosines the rotary embedding gives for a position."""
    zero = torch.zeros(1, 1, dtype=torch.long)
    cos, _ = model.rotary_of([1])(torch.zeros(1, 1, 1), zero, *rope_kinds[:1])
    return int(cos.shape[-1])


class _Reader:
    """Reads the weights of a model's layers."""

    def __init__(self, model: CausalModel, family: StepFamily, rope_kinds: Sequence[str]) -> None:
        shape = model.shape
        self._family, self._rope_kinds, self._config = family, rope_kinds, model.config
        self._head_dim = shape.head_dim
        self._queries, self._keys = (
            n * shape.head_dim for n in (shape.num_heads, shape.num_kv_heads)
        )

    def layer(self, layer: Any, reach: Reach) -> LayerWeights:
        attention, mlp = layer.self_attn, layer.mlp
        parts: dict[str, Any] = {
            **self._norms(layer),
            **self._head_norms(attention),
            **self._projections(attention),
            **({"experts": _experts(mlp)} if hasattr(mlp, "experts") else _gated(mlp)),
        }
        sinks = getattr(attention, "sinks", None)
        return LayerWeights(window=reach.window, rope=self._rope(attention), sinks=sinks, **parts)

    def norm(self, module: Any) -> torch.Tensor:
        weight: torch.Tensor = module.weight.float()
        return 1.0 + weight if self._family.has_offset_norms else weight

    def _rope(self, attention: Any) -> int | None:
        if not getattr(attention, "use_rope", True):
            return None
        if not self._rope_kinds:
            return 0
        return self._rope_kinds.index(self._config.layer_types[attention.layer_idx])

    def _norms(self, layer: Any) -> dict[str, torch.Tensor | None]:
        """Norms before or behind both halves of a layer, or both before and behind."""
        after = self.norm(layer.post_attention_layernorm)
        has_last = hasattr(layer, "post_feedforward_layernorm")
        if not has_last:
            return {"input_norm": self.norm(layer.input_layernorm), "output_norm": after}
        fed = self.norm(layer.post_feedforward_layernorm)
        if not hasattr(layer, "input_layernorm"):
            return {
                "input_norm": None,
                "attended_norm": after,
                "output_norm": None,
                "fed_norm": fed,
            }
        return {
            "input_norm": self.norm(layer.input_layernorm),
            "attended_norm": after,
            "output_norm": self.norm(layer.pre_feedforward_layernorm),
            "fed_norm": fed,
        }

    def _head_norms(self, attention: Any) -> dict[str, torch.Tensor]:
        if getattr(attention, "q_norm", None) is None:
            return {}
        query, key = self.norm(attention.q_norm), self.norm(attention.k_norm)
        if query.numel() == self._head_dim:
            return {"query_norm": query, "key_norm": key}
        return {"queries_norm": query, "keys_norm": key}

    def _projections(self, attention: Any) -> dict[str, LinearWeight]:
        if not hasattr(attention, "qkv_proj"):
            return {
                "query": _linear(attention.q_proj),
                "key": _linear(attention.k_proj),
                "value": _linear(attention.v_proj),
                "out": _linear(attention.o_proj),
            }
        fused, queries, keys = attention.qkv_proj, self._queries, self._keys
        return {
            "query": _linear(fused, 0, queries),
            "key": _linear(fused, queries, keys),
            "value": _linear(fused, queries + keys, keys),
            "out": _linear(attention.o_proj),
        }


def _gated(mlp: Any) -> dict[str, LinearWeight]:
    if not hasattr(mlp, "gate_up_proj"):
        gate, up = _linear(mlp.gate_proj), _linear(mlp.up_proj)
    else:
        inner = mlp.down_proj.in_features
        gate, up = _linear(mlp.gate_up_proj, 0, inner), _linear(mlp.gate_up_proj, inner, inner)
    return {"gate": gate, "up": up, "down": _linear(mlp.down_proj)}


def _experts(mlp: Any) -> ExpertWeights:
    router = mlp.gate if hasattr(mlp, "gate") else mlp.router
    experts = mlp.experts
    return ExpertWeights(
        router=router.weight,
        router_bias=getattr(router, "bias", None),
        gate_up=experts.gate_up_proj,
        gate_up_bias=getattr(experts, "gate_up_proj_bias", None),
        down=experts.down_proj,
        down_bias=getattr(experts, "down_proj_bias", None),
        inner=getattr(experts, "intermediate_dim", None) or experts.intermediate_size,
        chosen=router.top_k,
        is_normed=getattr(router, "norm_topk_prob", True),
        limit=getattr(experts, "limit", 0.0),
        alpha=getattr(experts, "alpha", 0.0),
    )


def _activation(layers: Any) -> str:
    """The activation of all layers. Raises `ValueError` if the step does not have it."""
    found: set[str] = set()
    for layer in layers:
        owner = getattr(layer.mlp, "experts", layer.mlp)
        act = getattr(owner, "act_fn", None) or getattr(owner, "activation_fn", None)
        found.add("SiLU" if act is None else type(act).__name__)  # gpt-oss has no module for it
    known = {ACTIVATIONS.get(name) for name in found}
    if len(known) > 1 or None in known:
        raise ValueError(f"not for the activation {', '.join(sorted(found))}")
    return str(known.pop())


def _linear(module: Any, first: int = 0, outs: int | None = None) -> LinearWeight:
    if type(module) not in (nn.Linear, PackedLinear):
        raise ValueError(f"not for layers of class {type(module).__name__}")
    weight = module.packed if isinstance(module, PackedLinear) else module.weight
    count = module.out_features if outs is None else outs
    return LinearWeight(weight=weight, first=first, outs=count, bias=module.bias)
