"""What the engine's worker needs of a core, and the snapshot that it makes of its load."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from gemserve.engine.cache.state import CacheState, StoredDocument
from gemserve.engine.sequence.progress import Progress
from gemserve.types import Event, Request


class Steps(Protocol):
    """What the engine needs of a core. Tests use a fake.

    `plan` returns a plan of any type, and `add` a job of any type. Any thread may call `plan`; only
    the worker calls the rest.
    """

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def waiting_of(self) -> Mapping[bytes, int]: ...
    @property
    def kv_usage_ratio(self) -> float: ...
    @property
    def cache_usage_ratio(self) -> float: ...
    @property
    def is_idle(self) -> bool: ...
    def plan(self, request: Request) -> Any: ...
    def add(self, request: Request, plan: Any) -> Any: ...
    def cancel(self, job: Any) -> list[tuple[Any, Event]]: ...
    def progress(self, job: Any) -> Progress | None: ...
    def step(self) -> list[tuple[Any, Event]]: ...
    @property
    def stored_documents(self) -> Mapping[str, StoredDocument]: ...
    @property
    def cache_state(self) -> CacheState: ...
    def forget_documents(self, ids: Collection[str]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Load:
    """How busy the core was when the worker last looked. `waiting_of`: requests of each tenant."""

    num_running: int = 0
    num_waiting: int = 0
    waiting_of: Mapping[bytes, int] = field(default_factory=dict)
    kv_usage_ratio: float = 0.0
    cache_usage_ratio: float = 0.0
    stored_documents: Mapping[str, StoredDocument] = field(default_factory=dict)
    cache: CacheState = field(default_factory=CacheState)


def load_of(core: Steps) -> Load:
    return Load(
        num_running=core.num_running,
        num_waiting=core.num_waiting,
        waiting_of=core.waiting_of,
        kv_usage_ratio=core.kv_usage_ratio,
        cache_usage_ratio=core.cache_usage_ratio,
        stored_documents=core.stored_documents,
        cache=core.cache_state,
    )
