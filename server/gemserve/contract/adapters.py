"""Adapters as requests use them, and as they are described."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

ADAPTER_NAME = "[A-Za-z0-9][A-Za-z0-9._-]{0,63}"  # a regular expression


class LoadedAdapter(Protocol):
    """An adapter as one request uses it: this version stays until the request ends.

    `num_positions`: positions that it takes before the prompt's first token.
    """

    @property
    def name(self) -> str: ...
    @property
    def version(self) -> str: ...
    @property
    def num_positions(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterInfo:
    """Describes an adapter by name. `is_loaded` says whether it is in memory now.

    `version`, `num_bytes` and `num_positions` are those of the last time that it was loaded.
    """

    name: str
    path: str
    kind: str
    version: str
    num_bytes: int
    num_positions: int
    is_loaded: bool


@dataclass(frozen=True, slots=True)
class AdapterName:
    """Which adapter a request uses, for who needs its tensors elsewhere or not at all."""

    name: str
    version: str
    num_positions: int
