"""Compares the recurrent states of all sequences with the memory that there is for them."""

from __future__ import annotations

import logging
from dataclasses import replace

from gemserve.config import EngineConfig, HostMemory, ResolvedEngineConfig
from gemserve.errors import ConfigError

log = logging.getLogger("gemserve.loading")
COPIES = 2  # of a state: the sequence's own, and that of a decode step
_STATE_SHARE = 0.5  # of what there is beside the weights, at most, if KV memory can be smaller
_LEAST_KV_BYTES = 64 << 20


def with_fitting_states(
    config: ResolvedEngineConfig, memory: HostMemory, *, state_bytes: int, weight_bytes: int
) -> ResolvedEngineConfig:
    """The settings with a default of `max_running` whose states fit beside weights and KV memory.

    A default KV memory may be lowered for them, too. `state_bytes`: of one sequence. Raises
    `ConfigError` for values that were chosen and do not fit.
    """
    default, each = EngineConfig().max_running, COPIES * state_bytes
    is_default = config.max_running == default
    room, kv_bytes = memory.usable - weight_bytes, config.kv_memory_bytes
    if kv_bytes + config.max_running * each <= room:
        return config
    running = config.max_running
    if is_default:
        most = room * _STATE_SHARE if memory.is_kv_default else room - kv_bytes
        running = max(1, min(running, int(most) // each))
    if memory.is_kv_default:
        kv_bytes = max(_LEAST_KV_BYTES, min(kv_bytes, room - running * each) >> 20 << 20)
    if weight_bytes + kv_bytes + running * each > memory.total:
        raise ConfigError(
            f"max_running={running}: their recurrent states are {running * each} bytes, "
            f"{state_bytes} for each request and as much for its decode steps; with {weight_bytes} "
            f"bytes of weights and {kv_bytes} of KV memory more than the {memory.total} bytes of "
            "memory that there are here; lower --max-running or --kv-memory"
        )
    for name, now, before in (
        ("max_running", running, config.max_running),
        ("kv_memory", kv_bytes, config.kv_memory_bytes),
    ):
        if now != before:
            log.warning(
                "%s=%d instead of %d, because each request has a recurrent state of %d bytes, and "
                "there are %d bytes of memory here; --%s sets it",
                *(name, now, before, state_bytes, memory.total, name.replace("_", "-")),
            )
    return replace(config, max_running=running, kv_memory_bytes=kv_bytes)
