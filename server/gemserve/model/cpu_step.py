"""Decode steps of Llama-like models on a CPU in one call of C++, where there is a compiler.

The model's modules stay as they are: only their weights are read, where they are. Prompts are read
by transformers' layers as before, and so are decode steps of sequences with adapters.
"""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from gemserve.errors import ConfigError
from gemserve.model.causal_model import CausalModel
from gemserve.model.kv import DecodeBatch, DecodeStep
from gemserve.model.packed_linear import PackedLinear
from gemserve.model.reach import Reach
from gemserve.types import Switch
from gemserve_kernels.cpu_step import CpuStep, LayerWeights, LinearWeight, StepSizes
from gemserve_kernels.native_library import CannotCompile

log = logging.getLogger("gemserve.model")
# their layers differ only in what `_layer` looks up
_ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
_LENGTHS = (5, 23)  # tokens of the sequences that are tried when a model is loaded
# of the largest logit; bfloat16 keeps 8 bits, and the step rounds less often than the layers do
_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.1}


def with_cpu_step(model: CausalModel, choice: Switch) -> CausalModel:
    """The model with the step, if `choice` and the machine allow it. "auto": if possible.

    Raises `ConfigError` if `choice` is "on" and the step cannot be used.
    """
    if choice == "off" or (choice == "auto" and model.device.type != "cpu"):
        return model
    try:
        stepping = model.with_step(_step_of(model))
        _check(model, stepping)
    except (CannotCompile, ValueError) as error:
        if choice == "on":
            raise ConfigError(f"cpu_step=on: {error}") from error
        log.info("decode steps run layer by layer, which takes longer: %s", error)
        return model
    log.info("a decode step without adapters is one call of compiled code")
    return stepping


class ModelStep:
    """One model's decode step: from ids and positions to logits."""

    def __init__(self, decoder: Any, step: CpuStep) -> None:
        self._embed, self._rotary, self._step = decoder.embed_tokens, decoder.rotary_emb, step

    def __call__(self, step: DecodeStep) -> torch.Tensor:
        hidden = self._embed(step.ids)
        cos, sin = self._rotary(hidden, position_ids=step.positions)
        return self._step(hidden[0], step.spans, cos[0], sin[0])


def _step_of(model: CausalModel) -> ModelStep:
    """Raises `CannotCompile`, or `ValueError` with the reason if the model is another one."""
    config, shape, hf = model.config, model.shape, model.hf
    if model.device.type != "cpu":
        raise ValueError(f"the model is on {model.device}")
    if config.model_type not in _ARCHITECTURES:
        raise ValueError(f"not for models of type {config.model_type}")
    if not model.is_rope_fixed:
        raise ValueError("this model's rotary embedding depends on each sequence's length")
    decoder = hf.model
    sizes = StepSizes(
        hidden=config.hidden_size,
        inner=config.intermediate_size,
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        eps=config.rms_norm_eps,
        scale=decoder.layers[0].self_attn.scaling,
    )
    if any(reach.chunk for reach in model.reaches):
        raise ValueError("not for layers that attend within chunks")
    layers = [_layer(*pair) for pair in zip(decoder.layers, model.reaches, strict=True)]
    norm = decoder.norm.weight
    return ModelStep(decoder, CpuStep(sizes, layers, norm, _linear(hf.lm_head), model.dtype))


def _layer(layer: Any, reach: Reach) -> LayerWeights:
    attention, mlp = layer.self_attn, layer.mlp
    if not isinstance(mlp.act_fn, nn.SiLU) and type(mlp.act_fn).__name__ != "SiLUActivation":
        raise ValueError(f"not for the activation {type(mlp.act_fn).__name__}")
    return LayerWeights(
        input_norm=layer.input_layernorm.weight,
        query_norm=_weight_of(attention, "q_norm"),
        key_norm=_weight_of(attention, "k_norm"),
        output_norm=layer.post_attention_layernorm.weight,
        window=reach.window,
        query=_linear(attention.q_proj),
        key=_linear(attention.k_proj),
        value=_linear(attention.v_proj),
        out=_linear(attention.o_proj),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
    )


def _weight_of(module: Any, name: str) -> torch.Tensor | None:
    child = getattr(module, name, None)
    return None if child is None else child.weight


def _linear(module: Any) -> LinearWeight:
    if type(module) not in (nn.Linear, PackedLinear):
        raise ValueError(f"not for layers of class {type(module).__name__}")
    weight = module.packed if isinstance(module, PackedLinear) else module.weight
    return LinearWeight(weight=weight, outs=module.out_features, bias=module.bias)


def _check(model: CausalModel, stepping: CausalModel) -> None:
    """Raise `ValueError` if the step's logits differ from the layers' on random tokens."""
    expected, actual = (_tried(tried) for tried in (model, stepping))
    difference = float((expected - actual).abs().max())
    limit = _TOLERANCE[model.dtype] * max(1.0, float(expected.abs().max()))
    if not difference <= limit:  # this also catches NaN
        raise ValueError(f"its logits differ by {difference:.3g}, the limit is {limit:.3g}")


def _tried(model: CausalModel) -> torch.Tensor:
    """The logits of a decode step of two sequences, read before: [2, vocab]."""
    layers, room = model.num_layers, max(_LENGTHS) + 1
    memory = model.new_memory(2 * layers * room * len(_LENGTHS))
    generator = torch.Generator().manual_seed(0)
    spans = []
    for index, length in enumerate(_LENGTHS):
        ids = torch.randint(0, model.vocab_size, (length,), generator=generator).tolist()
        kv = memory.kv(2 * layers * room * index, num_layers=layers, capacity=room)
        model.prefill_chunk(ids, start=0, kv=kv, rope_tokens=room, is_last=False)
        spans.append(kv)
    batch = DecodeBatch(memory, spans, slots=_LENGTHS, positions=_LENGTHS)
    return model.decode([1, 2], batch, [room] * len(spans))
