"""Builds an engine core from settings: it loads the model, and resolves and checks settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from gemserve.calibration.files import Calibration, find_calibration, read_calibration
from gemserve.config import (
    EngineConfig,
    HostMemory,
    ModelConfig,
    ResolvedEngineConfig,
    choose_calibration,
    find_offload_layers,
    find_segment_size,
    nearest_seeing,
    resolve_engine,
)
from gemserve.contract.filter_options import BESIDE_SEGMENT
from gemserve.cost import WeightPlan, check_device_memory
from gemserve.engine.core import Core, StepRunner
from gemserve.engine.running.runner import Runner
from gemserve.engine.state_memory import with_fitting_states
from gemserve.errors import ConfigError
from gemserve.filtering.methods import METHODS
from gemserve.model.base_model import hash_norms, hash_of
from gemserve.model.cpu.cpu_step import with_cpu_step
from gemserve.model.cpu.packed_linear import can_pack, with_packed_linears
from gemserve.model.families.reach import NOTHING
from gemserve.model.fused_parts import can_launch_parts, with_fused_parts
from gemserve.model.loading.compatibility import check_filter_pass
from gemserve.model.loading.loader import LoadedModel, load, resolve_device, shape_from_config
from gemserve.model.loading.weight_memory import weights_of
from gemserve.model.passes import fp8
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.fp8 import Product
from gemserve_kernels.fp8 import scaled_product

if TYPE_CHECKING:
    from gemserve.engine.ranks.ranks import Ranks


def build_core(model: ModelConfig, engine: EngineConfig) -> Core:
    """A core for these settings. Raises `ModelError` or `ConfigError`."""
    return assemble(load_for(model, engine), engine)


def load_for(model: ModelConfig, engine: EngineConfig) -> LoadedModel:
    """Load the model, with as many layers on the host as the settings require."""
    device = resolve_device(model.device)
    if engine.filter_precision == "fp8":
        fp8.check_device(device)
    return load(model, _offload_layers(model, engine, device))


def load_rank_0(ranks: Ranks) -> LoadedModel:
    """Load this process's part of a model that several ranks have together. Raises `ModelError`."""
    from gemserve.engine.ranks.group import join_group

    config, num_ranks = ranks.model, ranks.num_ranks
    join_group(ranks.store, 0, num_ranks, resolve_device(config.device))
    return load(config, num_ranks=num_ranks)


def assemble(
    loaded: LoadedModel,
    engine: EngineConfig,
    calibration: Calibration | None = None,
    new_runner: Callable[..., StepRunner] = Runner,
    new_core: Callable[..., Core] = Core,
) -> Core:
    """A core over a loaded model. Without a `calibration` it uses the one it finds, or a guess.

    `new_runner`: see `Core`.
    """
    if calibration is None:
        calibration = calibration_for(loaded, engine)
    causal = loaded.model
    resolved = _within_memory(causal, settings_for(causal, engine, calibration))
    if causal.shard is not None:  # all of these want whole weights, or steps of one process
        resolved = replace(resolved, cuda_graphs="off", cpu_step="off")
    elif causal.device.type == "cpu":
        is_packed = can_pack(causal.device, causal.dtype)
        hf = with_packed_linears(causal.hf) if is_packed else causal.hf
        causal = causal.variant(with_fused_parts(hf))
    elif can_launch_parts(causal.device, causal.dtype) and causal.num_host_layers == 0:
        causal = causal.variant(with_fused_parts(causal.hf))
    if resolved.filter_precision == "fp8":  # after `variant`, which has a tree's own filter layers
        fp8.check_device(causal.device)
        causal = with_fp8_filter(causal, resolved)
    causal = with_cpu_step(causal, resolved.cpu_step)
    return new_core(
        model=causal,
        tokenizer=loaded.tokenizer,
        config=resolved,
        eos_ids=loaded.eos_ids,
        calibration=calibration,
        new_runner=new_runner,
    )


def settings_for(
    causal: CausalModel, engine: EngineConfig, calibration: Calibration
) -> ResolvedEngineConfig:
    """The settings with this calibration. Raises `ConfigError` if they do not suit the model."""
    resolved = resolve_engine(
        engine,
        calibration,
        is_adaptive=METHODS[engine.filter_method].is_adaptive,
        num_layers=causal.num_layers,
        context_tokens=causal.context_tokens,
    )
    assert causal.num_host_layers == resolved.offload_layers, "loaded for other settings"
    if engine.max_prompt_tokens is None:
        resolved = _within_sliding_window(causal, resolved, calibration)
    _check_longest(causal, resolved)
    _check_filter_layer(causal, resolved, calibration)
    if causal.has_states:
        _check_with_states(causal, resolved)
    if resolved.filter_keep == "auto" and not METHODS[resolved.filter_method].is_adaptive:
        raise ConfigError(f"filter_keep=auto: method {resolved.filter_method} does not have it")
    return resolved


def _within_memory(model: CausalModel, config: ResolvedEngineConfig) -> ResolvedEngineConfig:
    """The settings with as many sequences at once as have room for their recurrent states.

    Raises `ConfigError` if weights, KV memory and states do not fit. On a CPU, weights and KV
    memory are compared before weights are read.
    """
    weights, memory = planned_weights(model, config), config.host_memory
    if model.device.type == "cuda":
        total = torch.cuda.get_device_properties(model.device).total_memory
        total *= 1 if model.shard is None else model.shard.num_ranks
        check_device_memory(total, weights, config.kv_memory_bytes)
        memory = HostMemory(total, total, is_kv_default=False)
    if memory is None or not model.has_states:
        return config
    return with_fitting_states(
        config, memory, state_bytes=model.states.num_bytes, weight_bytes=weights.device
    )


def calibration_for(loaded: LoadedModel, engine: EngineConfig) -> Calibration:
    """The calibration for these settings. Raises `ConfigError` for a wrong file."""
    model = loaded.model
    calibration = None
    path = calibration_path(loaded, engine)
    if path is not None:
        calibration = read_calibration(
            path,
            num_layers=model.num_layers,
            num_heads=model.shape.num_heads,
            weights=hash_of(model),
        )
    return choose_calibration(
        engine.filter_layer,
        calibration,
        num_layers=model.num_layers,
        hidden_size=model.config.hidden_size,
        vocab_size=model.vocab_size,
        sliding_windows=model.sliding_windows,
    )


def calibration_path(loaded: LoadedModel, engine: EngineConfig) -> Path | None:
    """The calibration file that is used for this model, if there is one."""
    if engine.calibrate == "off":
        return None
    if engine.calibrate not in ("auto", "later"):
        return Path(engine.calibrate)
    return find_calibration(
        loaded.source,
        model=loaded.name,
        weights=hash_of(loaded.model),
        norms=hash_norms(loaded.model.hf),
    )


def planned_weights(model: CausalModel, config: ResolvedEngineConfig) -> WeightPlan:
    """Where a loaded model's weights are."""
    return weights_of(
        model.hf,
        model.dtype,
        filter_layer=config.filter_layer,
        filter_precision=config.filter_precision,
        offload_layers=config.offload_layers,
    )


def with_fp8_filter(
    model: CausalModel, config: ResolvedEngineConfig, product: Product = scaled_product
) -> CausalModel:
    """The model with FP8 products in its filter passes. Raises `ConfigError` or `ModelError`."""
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
    path = None
    # the weights are not read yet, so the calibration is found by the model's name
    if engine.calibrate in ("auto", "later"):
        path = find_calibration(source, model=model.model, weights=None)
    elif engine.calibrate != "off":
        path = Path(engine.calibrate)
    calibration = None
    if path is not None:
        calibration = read_calibration(path, num_layers=shape.num_layers, num_heads=shape.num_heads)
    layer = choose_calibration(
        engine.filter_layer,
        calibration,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        sliding_windows=shape.seen,
    ).layer
    return find_offload_layers(engine.offload_layers, shape.num_layers, layer)


def _within_sliding_window(
    model: CausalModel, config: ResolvedEngineConfig, calibration: Calibration
) -> ResolvedEngineConfig:
    """Longer prompts than the filter layer sees are read in segments, if these are small enough."""
    seen = model.window_of(config.filter_layer)
    size = find_segment_size(config.filter_window, calibration)
    if seen is None or size is None or not METHODS[config.filter_method].reads_segments:
        return config
    if size + BESIDE_SEGMENT > seen:
        return config
    return replace(config, max_pass_tokens=min(config.max_pass_tokens, seen))


def _check_longest(model: CausalModel, config: ResolvedEngineConfig) -> None:
    """Refuse prompts beyond the model's context if no filter would make them shorter."""
    limit, context = config.max_prompt_tokens, model.context_tokens
    most = model.learned_positions
    if most is not None and config.max_pass_tokens > most:
        raise ConfigError(
            f"max_prompt_tokens={limit}: must be from 1 to {most}: the model has learned so many "
            "positions, and a filter pass would read beyond them"
        )
    if limit >= context and METHODS[config.filter_method].selector is None:
        raise ConfigError(
            f"max_prompt_tokens={limit}: must be from 1 to {context - 1}, one less than the "
            f"model's context, with --filter {config.filter_method}"
        )


def _check_with_states(model: CausalModel, config: ResolvedEngineConfig) -> None:
    """Refuse what models whose layers keep a recurrent state do not have."""
    if config.filter_precision == "fp8":
        raise ConfigError(
            "filter_precision=fp8: layers of this model keep a recurrent state, so it must be model"
        )
    if METHODS[config.filter_method].evictor is not None and NOTHING in model.reaches:
        raise ConfigError(
            f"filter={config.filter_method}: {model.reaches.count(NOTHING)} of the model's layers "
            "have no attention, and so no keys that could be dropped; choose another --filter"
        )


def _check_filter_layer(
    model: CausalModel, config: ResolvedEngineConfig, calibration: Calibration
) -> None:
    """Refuse a filter layer whose sliding window cannot see the start of prompts."""
    layer, limit = config.filter_layer, config.max_pass_tokens
    if METHODS[config.filter_method].selector is None or calibration.is_awaited:
        return
    full = [i for i in range(model.num_layers) if model.window_of(i) is None]
    choices = f"choose --filter-layer among {full}" if full else "no layer sees everything"
    window = model.window_of(layer)
    if model.reaches[layer] == NOTHING:
        raise ConfigError(
            f"filter_layer={layer}: this layer has no attention; the nearest that have it: "
            f"{nearest_seeing(layer, model.sliding_windows)}"
        )
    if window is not None and window < limit:
        raise ConfigError(
            f"filter_layer={layer}: this layer sees only the last {window} tokens; {choices}, set "
            f"--max-prompt-tokens to at most {window}, or serve with --filter none"
        )
    heads = calibration.heads if layer == calibration.layer else None
    for index, head in heads or ():
        window = model.window_of(index)
        if window is not None and window < limit:
            raise ConfigError(
                f"calibration: head {index}.{head}: its layer sees only the last {window} tokens; "
                f"calibrate the model anew, set --max-prompt-tokens to at most {window}, or serve "
                "with --calibrate off"
            )
