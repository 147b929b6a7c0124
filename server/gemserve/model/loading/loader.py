"""Loads a model by name, ready to serve."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from gemserve.config import DtypeName, ModelConfig
from gemserve.cost import ModelShape
from gemserve.errors import ConfigError, GemserveError, ModelError, shown
from gemserve.model.base_model import hash_norms_of, hash_weights
from gemserve.model.cpu.bfloat16_speed import is_bfloat16_faster
from gemserve.model.families.config_check import check_config
from gemserve.model.families.planned_reach import planned_shape
from gemserve.model.families.prepared_layers import prepare
from gemserve.model.families.reach import find_reaches
from gemserve.model.loading.checkpoint import BUILTIN_PATH as BUILTIN_PATH
from gemserve.model.loading.checkpoint import Checkpoint, GgufCheckpoint, open_checkpoint
from gemserve.model.loading.chosen_chat_template import choose_chat_template
from gemserve.model.loading.compatibility import check_servable
from gemserve.model.loading.quantise_linears import plan_quantised, quantise
from gemserve.model.loading.quantised import check_quantisation, quantisation_of
from gemserve.model.loading.remembered_checks import check_once
from gemserve.model.passes.causal_model import CausalModel
from gemserve.model.passes.offload import HostLayers
from gemserve.model.passes.recurrent_state import find_states
from gemserve.model.rank_shard import RankShard, check_divisible, shard_of
from gemserve.model.shape import decoder_path, follow, layers_of, list_name, shape_of
from gemserve_kernels import select_backend
from gemserve_kernels.blocks import check_compiled
from gemserve_kernels.native_library import CannotCompile

log = logging.getLogger("gemserve.loading")
_MOST_CHARS = 600  # of a message of transformers
_DTYPES: dict[DtypeName, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedModel:
    """A checked model, its tokenizer, the tokens that end an answer, and where it came from.

    `name`: the model's name in the config it was loaded by.
    """

    model: CausalModel
    tokenizer: Any
    eos_ids: frozenset[int]
    source: str
    name: str


def load(
    config: ModelConfig, offload_layers: int = 0, *, rank: int = 0, num_ranks: int = 1
) -> LoadedModel:
    """Load weights and tokenizer, then check that gemserve computes this architecture correctly.

    The upper `offload_layers` stay on the host; the device never holds all of them at once. With
    several ranks this is one of `num_ranks` processes, which call this at the same time. Raises
    `ModelError` naming what is missing, broken or unsupported, and `ConfigError` for a device or an
    attention backend that cannot be used.
    """
    device = resolve_device(config.device)
    with _backend_errors():  # before anything is read
        select_backend(device, name=config.attention_backend, dtype=_DTYPES.get(config.dtype))
    from transformers.utils import logging as transformers_logging

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    with _load_errors(f"cannot load model {config.model!r}"):
        checkpoint = open_checkpoint(config)
        check_config(checkpoint.config)
        check_quantisation(checkpoint.source, checkpoint.config, device)
        dtype = _resolve_dtype(config.dtype, checkpoint.config, device)
        with _backend_errors():  # fail before minutes are spent on loading
            select_backend(device, name=config.attention_backend, dtype=dtype)
        tokenizer = checkpoint.load_tokenizer()
        choose_chat_template(tokenizer, config.chat_template)
        in_blocks = _keeps_blocks(checkpoint, config, device, dtype)
        weights = checkpoint.load_weights(dtype, num_ranks, in_blocks=in_blocks)
        if config.quantise != "off":
            weights.weights_before = hash_weights(weights, rounded=True)
            count = quantise(weights, config.quantise)
            log.info("%d matrices are quantised to %s", count, config.quantise)
        shard = None
        if num_ranks > 1:
            whole = hash_weights(weights, rounded=True)
            shard = shard_of(weights, rank=rank, num_ranks=num_ranks, weights=whole)
    try:
        with _load_errors("cannot be served"), _backend_errors():
            model = place(weights, device, offload_layers, config.attention_backend, shard)
        if device.type == "cpu" and num_ranks == 1 and not config.trust_remote_code:
            settings = config, dtype, offload_layers
            check_once(partial(check_servable, model), checkpoint.source, settings)
        else:  # a driver or another process may have changed, or code that is not in the folder
            check_servable(model)
    except ModelError as error:
        raise ModelError(f"model {config.model!r}: {error}") from error
    if not hasattr(tokenizer, "backend_tokenizer"):
        raise ModelError(f"cannot serve model {config.model!r}: its tokenizer is not a fast one")
    # a checkpoint may have settings of its training, which would silently cut prompts
    tokenizer.backend_tokenizer.no_truncation()
    tokenizer.backend_tokenizer.no_padding()
    _warn_of_unknown_ids(tokenizer, model.vocab_size)
    eos_ids = _eos_ids(weights.generation_config, tokenizer)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        eos_ids=eos_ids,
        source=checkpoint.source,
        name=config.model,
    )


def check_ranks(config: ModelConfig, num_ranks: int) -> None:
    """Raise `ConfigError` or `ModelError` if that many ranks cannot have the model together.

    Only its config is read.
    """
    with _load_errors(f"cannot read the config of model {config.model!r}"):
        checkpoint = open_checkpoint(config)
        if isinstance(checkpoint, GgufCheckpoint):
            raise ConfigError(
                f"tensor_parallel={num_ranks}: not for GGUF files; serve the model's own folder"
            )
        if config.quantise != "off":
            raise ConfigError(
                f"tensor_parallel={num_ranks}: not with quantise={config.quantise}; must be off"
            )
        if quantisation_of(checkpoint.config) is not None:
            raise ConfigError(
                f"tensor_parallel={num_ranks}: not for quantised weights, which are dequantised "
                "as a whole; serve the original model"
            )
        check_divisible(checkpoint.config, num_ranks)


def place(
    weights: Any,
    device: torch.device,
    offload_layers: int,
    attention_backend: str | None = None,
    shard: RankShard | None = None,
) -> CausalModel:
    """Move a transformers model from the host to `device`, except for its upper layers.

    Raises `ValueError` if the backend of that name cannot be used with this model.
    """
    if offload_layers == 0:
        return CausalModel(weights.to(device), attention_backend=attention_backend, shard=shard)
    num_layers = weights.config.num_hidden_layers
    decoder = follow(weights, decoder_path(weights, num_layers))
    prepare(layers_of(decoder))
    if find_states(weights.eval()).parts:
        raise ConfigError(
            f"offload_layers={offload_layers}: not for models whose layers keep a recurrent state; "
            "must be 0"
        )
    # while its layers are in one place
    reaches = find_reaches(weights.eval(), shape_of(weights, weights.dtype))
    name = list_name(decoder)
    layers = list(layers_of(decoder))
    first = len(layers) - offload_layers
    host = HostLayers(layers, first, device)
    # without the upper layers, all that is left belongs on the device
    every = layers_of(decoder)
    setattr(decoder, name, torch.nn.ModuleList(layers[:first]))
    weights.to(device)
    setattr(decoder, name, every)
    return CausalModel(weights, host=host, attention_backend=attention_backend, reaches=reaches)


@contextmanager
def _backend_errors() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ConfigError(str(error)) from error


@contextmanager
def _load_errors(what: str) -> Iterator[None]:
    try:
        yield
    except GemserveError:
        raise
    except Exception as error:  # the loaders raise errors of almost any type
        raise ModelError(f"{what}: {_in_one_line(error)}") from error


def _in_one_line(error: Exception) -> str:
    """The error's message without line breaks, and its type if the message says little."""
    message = " ".join(str(error).split())
    says_little = isinstance(error, (LookupError, AttributeError, TypeError)) or not message
    message = f"{type(error).__name__}: {message}" if says_little else message
    return message if len(message) <= _MOST_CHARS else f"{message[:_MOST_CHARS]} …"


def shape_from_config(config: ModelConfig) -> tuple[ModelShape, str]:
    """The model's geometry and source from `config.json` alone, without reading weights."""
    model, dtype, source = model_from_config(config)
    return planned_shape(model, dtype), source


def model_from_config(config: ModelConfig) -> tuple[Any, torch.dtype, str]:
    """A model without weights, the dtype that they would have, and the model's source.

    dtype "auto" is the checkpoint's own unless a device is named, because costs are often computed
    on another machine than the one that will serve.
    """
    from transformers import AutoModelForCausalLM

    device = torch.device("cuda" if config.device == "auto" else config.device)
    with _load_errors(f"cannot read the config of model {config.model!r}"):
        checkpoint = open_checkpoint(config)
        check_config(checkpoint.config)
        check_quantisation(checkpoint.source, checkpoint.config, device)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(
                checkpoint.config, trust_remote_code=config.trust_remote_code
            )
    dtype = _resolve_dtype(config.dtype, checkpoint.config, device)
    if _keeps_blocks(checkpoint, config, device, dtype):
        checkpoint.plan_blocks(model)
    if config.quantise != "off":
        plan_quantised(model, config.quantise)
    return model, dtype, checkpoint.source


def norms_from_config(config: ModelConfig, empty: Any) -> str | None:
    """The hash of the norms (`hash_norms`) of a model on the meta device, if they can be read.

    `config`, `empty`: as given to and made by `model_from_config`.
    """
    with _load_errors(f"cannot read the norms of model {config.model!r}"):
        return hash_norms_of(open_checkpoint(config).norms(empty))


def _keeps_blocks(
    checkpoint: Checkpoint, config: ModelConfig, device: torch.device, dtype: torch.dtype
) -> bool:
    """Whether the checkpoint's weights are in blocks, or will be, and stay so.

    Raises `ConfigError` if weights are to be quantised and cannot be in blocks.
    """
    _check_quantise(config, device, dtype)
    has_any = checkpoint.has_blocks or config.quantise != "off"
    is_dense = config.weights == "dense" or device.type != "cpu" or dtype == torch.float16
    if is_dense or not has_any:
        return False
    try:
        check_compiled()
    except CannotCompile as error:
        if config.quantise != "off":
            raise ConfigError(f"quantise={config.quantise}: {error}") from error
        log.info("weights in blocks are dequantised, which takes more memory: %s", error)
        return False
    return True


def _check_quantise(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> None:
    if config.quantise == "off":
        return
    wrong = {
        f"device {device}": device.type != "cpu",
        "dtype=float16": dtype == torch.float16,
        f"weights={config.weights}": config.weights == "dense",
    }
    for name, is_wrong in wrong.items():
        if is_wrong:
            raise ConfigError(
                f"quantise={config.quantise}: not with {name}; must be off, or on a CPU in float32 "
                "or bfloat16"
            )


def _warn_of_unknown_ids(tokenizer: Any, vocab_size: int) -> None:
    unknown = [token for token, index in tokenizer.get_vocab().items() if index >= vocab_size]
    if unknown:
        log.warning(
            "the tokenizer has %d tokens that the model of %d has not, such as %s: prompts with "
            "them are refused",
            len(unknown),
            vocab_size,
            shown(unknown[0]),
        )


def _eos_ids(generation_config: Any, tokenizer: Any) -> frozenset[int]:
    configured = getattr(generation_config, "eos_token_id", None)
    if configured is None:
        configured = tokenizer.eos_token_id
    if configured is None:
        return frozenset()
    return frozenset([configured] if isinstance(configured, int) else configured)


def resolve_device(device: str) -> torch.device:
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(f"device={device!r}: this machine has no usable CUDA device")
    return torch.device(device)


def with_dtype(config: ModelConfig) -> ModelConfig:
    """`config` with the name of the dtype that "auto" means here, for processes that must agree.

    Only the checkpoint's config is read. Raises `ConfigError` or `ModelError`.
    """
    with _load_errors(f"cannot read the config of model {config.model!r}"):
        stored = open_checkpoint(config).config
    dtype = _resolve_dtype(config.dtype, stored, resolve_device(config.device))
    (name,) = (name for name, known in _DTYPES.items() if known == dtype)
    return dataclasses.replace(config, dtype=name)


def _resolve_dtype(name: DtypeName, hf_config: Any, device: torch.device) -> torch.dtype:
    """The dtype of that name. "auto": the checkpoint's, or float32 on a CPU slower in bfloat16."""
    if name != "auto":
        return _DTYPES[name]
    stored: torch.dtype = getattr(hf_config, "dtype", None) or torch.bfloat16
    if device.type != "cpu" or (stored == torch.bfloat16 and is_bfloat16_faster()):
        return stored
    return torch.float32
