"""From settings to an engine core ready to run requests."""

from __future__ import annotations

import torch

from gemserve.calibration import read_filter_layer
from gemserve.config import (
    EngineConfig,
    ModelConfig,
    find_filter_layer,
    find_offload_layers,
    resolve_engine,
)
from gemserve.cost import WeightPlan, check_device_memory
from gemserve.engine.core import Core
from gemserve.errors import ConfigError
from gemserve.filtering.table import ADAPTIVE, SELECTORS
from gemserve.model import fp8
from gemserve.model.causal import CausalModel
from gemserve.model.check import check_filter_pass
from gemserve.model.fp8 import Product
from gemserve.model.loader import Loaded, load, resolve_device, shape_from_config
from gemserve.model.weights import weights_of
from gemserve_kernels.fp8 import scaled_product


def build_core(model: ModelConfig, engine: EngineConfig) -> Core:
    """Load the model and resolve what is automatic. Raises `ModelError` or `ConfigError`."""
    device = resolve_device(model.device)
    if engine.filter_precision == "fp8":
        fp8.check_device(device)
    return assemble(load(model, _offload_layers(model, engine, device)), engine)


def assemble(loaded: Loaded, engine: EngineConfig) -> Core:
    """An engine core over a loaded model."""
    causal = loaded.model
    calibrated = None
    if engine.filter_layer is None:
        calibrated = read_filter_layer(loaded.source, causal.num_layers)
    resolved = resolve_engine(
        engine,
        num_layers=causal.num_layers,
        hidden_size=causal.config.hidden_size,
        vocab_size=causal.vocab_size,
        context_tokens=causal.context_tokens,
        model_filter_layer=calibrated,
    )
    assert causal.num_host_layers == resolved.offload_layers, "loaded for other settings"
    _check_filter_layer(causal, resolved)
    if resolved.filter_keep == "auto" and resolved.filter_method not in ADAPTIVE:
        raise ConfigError(f"filter_keep=auto: method {resolved.filter_method} does not have it")
    if causal.device.type == "cuda":
        total = torch.cuda.get_device_properties(causal.device).total_memory
        check_device_memory(total, planned_weights(causal, resolved), resolved.kv_memory_bytes)
    if resolved.filter_precision == "fp8":
        fp8.check_device(causal.device)
        causal = with_fp8_filter(causal, resolved)
    return Core(
        model=causal,
        tokenizer=loaded.tokenizer,
        config=resolved,
        eos_ids=loaded.eos_ids,
    )


def planned_weights(model: CausalModel, config: EngineConfig) -> WeightPlan:
    """Where a loaded model's weights are under settings with nothing automatic left."""
    assert config.filter_layer is not None
    assert config.offload_layers != "auto"
    return weights_of(
        model.hf,
        model.dtype,
        filter_layer=config.filter_layer,
        filter_precision=config.filter_precision,
        offload_layers=config.offload_layers,
    )


def with_fp8_filter(
    model: CausalModel, config: EngineConfig, product: Product = scaled_product
) -> CausalModel:
    """The model with FP8 products in its filter passes. Raises `ConfigError` or `ModelError`."""
    assert config.filter_layer is not None
    layers = model.lower_layers(config.filter_layer)
    if product is scaled_product:
        fp8.check_sizes(layers)
    filtering = model.with_filter_layers(fp8.fp8_layers(layers, product))
    check_filter_pass(filtering, config.filter_layer)
    return filtering


def _offload_layers(model: ModelConfig, engine: EngineConfig, device: torch.device) -> int:
    """How many layers stay on the host, found before weights are read."""
    if engine.offload_layers == 0:
        return 0
    if device.type == "cpu":
        raise ConfigError(
            f"offload_layers={engine.offload_layers}, device cpu: its memory is the host's, so "
            "nothing would be saved; must be 0"
        )
    shape, source = shape_from_config(model)
    calibrated = None
    if engine.filter_layer is None:
        calibrated = read_filter_layer(source, shape.num_layers)
    layer = find_filter_layer(
        engine.filter_layer,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        model_filter_layer=calibrated,
    )
    return find_offload_layers(engine.offload_layers, shape.num_layers, layer)


def _check_filter_layer(model: CausalModel, config: EngineConfig) -> None:
    """Refuse a filter layer that cannot see the start of the prompts it would filter."""
    layer, limit = config.filter_layer, config.max_prompt_tokens
    assert layer is not None
    assert limit is not None
    window = model.window_of(layer)
    if config.filter_method not in SELECTORS or window is None or window >= limit:
        return
    full = [i for i in range(model.num_layers) if model.window_of(i) is None]
    choices = f"choose --filter-layer among {full}" if full else "no layer sees everything"
    raise ConfigError(
        f"filter_layer={layer}: this layer sees only the last {window} tokens; {choices}, set "
        f"--max-prompt-tokens to at most {window}, or serve with --filter none"
    )
