"""Joins a process to the group of ranks, through which torch sums and gathers tensors."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from gemserve.errors import ConfigError

# Ranks load at different speeds, and first meet when all have. A rank that hangs later is noticed
# by `Ranks`, much sooner.
_MEETING = timedelta(minutes=30)
_GLOO = "gloo_of_one_thread"


def _gloo_of_one_thread(
    store: Any, rank: int, num_ranks: int, timeout: timedelta
) -> dist.ProcessGroupGloo:
    """A gloo group with one worker thread.

    torch 2.13 gives a group two, which both write the name of the last collective without a lock.
    Once in half a million collectives one writes to what the other has freed, and a rank dies.
    """
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [dist.ProcessGroupGloo.create_default_device()]
    options._timeout = timeout
    options._threads = 1
    return dist.ProcessGroupGloo(store, rank, num_ranks, options)


dist.Backend.register_backend(_GLOO, _gloo_of_one_thread, devices=["cpu"])


def join_group(store: Path, rank: int, num_ranks: int, device: torch.device) -> None:
    """Wait until all ranks have come to the file `store`. Raises `ConfigError`."""
    has_accelerator = torch.cuda.is_available()
    if (device.type == "cuda") != has_accelerator:
        raise ConfigError(
            f"device={device}, tensor_parallel={num_ranks}: transformers places the weights on "
            f"{'the GPUs' if has_accelerator else 'the CPU'}"
        )
    if device.type == "cuda":
        if torch.cuda.device_count() < num_ranks:
            raise ConfigError(
                f"tensor_parallel={num_ranks}: this machine has {torch.cuda.device_count()} GPUs"
            )
        torch.cuda.set_device(rank)
    if sys.platform == "linux":  # its name of the loopback interface
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    os.environ["LOCAL_RANK"] = str(rank)  # transformers chooses a GPU by it
    is_cuda = device.type == "cuda"
    dist.init_process_group(
        "nccl" if is_cuda else _GLOO,
        store=dist.FileStore(str(store), num_ranks),  # type: ignore[attr-defined]
        rank=rank,
        world_size=num_ranks,
        timeout=_MEETING,
        device_id=torch.device("cuda", rank) if is_cuda else None,
    )


def leave_group() -> None:
    """Idempotent."""
    if dist.is_initialized():
        dist.destroy_process_group()
    os.environ.pop("LOCAL_RANK", None)  # training would wait for other ranks


def gather_heads(of_rank: torch.Tensor) -> torch.Tensor:
    """On rank 0 the rows of all ranks, one after another; elsewhere what was given.

    All ranks call it, with tensors of one shape.
    """
    rows = of_rank.contiguous()
    if dist.get_rank():
        dist.gather(rows, dst=0)
        return of_rank
    parts = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
    dist.gather(rows, parts, dst=0)
    return torch.cat(parts)
