"""Opens the document cache's folder for one model, and names what keys and values depend on."""

from __future__ import annotations

import hashlib
import json
import logging
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache as remembered
from pathlib import Path
from typing import Any

import torch
import transformers

import gemserve.model
import gemserve_kernels
from gemserve.config import ResolvedEngineConfig
from gemserve.engine.cache.document_cache import DocumentCache
from gemserve.engine.cache.folder import CacheFolder
from gemserve.engine.reuse.disk import DiskCache, HostCopies
from gemserve.model.passes.causal_model import CausalModel
from gemserve_kernels.blocks import BlockWeight

log = logging.getLogger("gemserve.engine")


def open_disk_cache(
    config: ResolvedEngineConfig,
    model: CausalModel,
    copies: HostCopies,
    cache: DocumentCache,
    seconds_per_cost: Callable[[], float | None],
) -> DiskCache | None:
    """The disk's part of the document cache, if there is one. Raises `ConfigError`.

    `seconds_per_cost`: see `DiskCache`.
    """
    if config.cache_dir is None:
        return None
    if not model.has_reusable_beginnings:
        log.warning("cache_dir=%s: not used, this model has no document cache", config.cache_dir)
        return None
    return DiskCache(
        CacheFolder(Path(config.cache_dir), config.cache_disk_bytes),
        cache,
        copies,
        model.shape,
        identity_of(model, config),
        seconds_per_cost,
    )


def identity_of(model: CausalModel, config: ResolvedEngineConfig) -> str:
    """All that keys and values depend on besides tokens, adapter and layer, as JSON.

    That is every weight, every setting of the model, and whatever may compute them otherwise in the
    last digit.
    """
    settings = model.config.to_dict()
    settings.pop("_name_or_path", None)
    device = "cpu"
    if model.device.type == "cuda":
        device = torch.cuda.get_device_name(model.device)
    return json.dumps(
        {
            "weights": hash_all_weights(model.hf),
            "settings": settings,
            "dtype": str(model.dtype),
            "filter_precision": config.filter_precision,
            "backend": [model.backend.name, model.backend.kernels],
            "device": device,
            "versions": [torch.__version__, transformers.__version__],
            "code": _hash_of_code(),
        },
        sort_keys=True,
        default=str,
    )


@remembered
def _hash_of_code() -> str:
    """A hash of what computes keys and values: a mend there must not find those from before."""
    whole = hashlib.sha256()
    for package in (gemserve.model, gemserve_kernels):
        root = Path(str(package.__file__)).parent
        for path in sorted(
            path for path in root.rglob("*") if path.suffix in (".py", ".cpp", ".h")
        ):
            whole.update(str(path.relative_to(root)).encode() + path.read_bytes())
    return whole.hexdigest()


def hash_all_weights(hf: Any) -> str:
    """A hash of all parameters and buffers, every byte of them."""
    named = sorted([*hf.named_parameters(), *hf.named_buffers()], key=lambda pair: pair[0])
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        digests = list(threads.map(_hash_weight, [tensor for _, tensor in named]))
    whole = hashlib.sha256()
    for (name, tensor), digest in zip(named, digests, strict=True):
        whole.update(f"{name} {tensor.dtype} {tuple(tensor.shape)} ".encode() + digest)
    return whole.hexdigest()


def _hash_weight(tensor: torch.Tensor) -> bytes:
    if isinstance(tensor, BlockWeight):
        blocks = tensor.blocks
        stored = hashlib.blake2b(blocks.data.numpy().data, digest_size=32)
        stored.update(blocks.scales.numpy().data)
        return stored.digest()
    weight = tensor.to_dense() if tensor.is_mkldnn else tensor  # packed for the CPU
    numbers = weight.detach().cpu().contiguous().reshape(-1)
    return hashlib.blake2b(numbers.view(torch.uint8).numpy().data, digest_size=32).digest()
