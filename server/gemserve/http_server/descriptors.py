"""File descriptors: every connection needs one, and a process may have only so many."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import time
from contextlib import suppress
from dataclasses import replace
from typing import Any

from gemserve.config import ServerConfig
from gemserve.errors import ConfigError

log = logging.getLogger("gemserve.http")
BACKLOG = 2048  # connections that wait to be accepted; as many are accepted before any is counted
_RESERVED = 24  # for files that are opened later, such as documents, adapters and PDFs
_FEWEST = 4  # connections
_PAUSE_S = 1.0  # between two lines that say that descriptors are used up


def raise_descriptor_limit() -> None:
    """Let this process have as many descriptors as the system gives it."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with suppress(OSError, ValueError):  # some systems call a limit infinite that is not
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def fit_connections(config: ServerConfig) -> tuple[ServerConfig, int]:
    """The settings with no more connections than there are descriptors for, and the backlog.

    Connections are accepted in one go, as many as the backlog, before the server can close any of
    them. So there are descriptors for both. Raises `ConfigError` if next to none can be had.
    """
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return config, BACKLOG
    free = limit - _num_open() - _RESERVED
    if free >= config.max_connections + BACKLOG:
        return config, BACKLOG
    if free // 2 < _FEWEST:
        raise ConfigError(
            f"max_connections={config.max_connections}: the limit of open files is {limit}, which "
            f"leaves {max(0, free)} for connections; raise it (ulimit -n)"
        )
    most = min(config.max_connections, max(free // 2, free - BACKLOG))
    if most < config.max_connections:
        log.warning(
            "max_connections=%d is lowered to %d: the limit of open files is %d (ulimit -n)",
            config.max_connections,
            most,
            limit,
        )
    return replace(config, max_connections=most), free - most


class RareAcceptErrors:
    """The handler of the event loop's errors. It logs used up descriptors once a second at most.

    asyncio tells it of every connection that it cannot accept, thousands of times a second.
    """

    def __init__(self) -> None:
        self._logged_s = float("-inf")
        self._num_skipped = 0

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        if "socket.accept" not in context.get("message", ""):
            loop.default_exception_handler(context)
            return
        now_s = time.monotonic()
        if now_s - self._logged_s < _PAUSE_S:
            self._num_skipped += 1
            return
        log.error(
            "a connection cannot be accepted: %s; %d more since the last line",
            context.get("exception"),
            self._num_skipped,
        )
        self._logged_s, self._num_skipped = now_s, 0


def _num_open() -> int:
    for folder in ("/proc/self/fd", "/dev/fd"):
        with suppress(OSError):
            return len(os.listdir(folder))
    return 64
