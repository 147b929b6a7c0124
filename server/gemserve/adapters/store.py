"""The adapters a server has loaded, by name, under one memory limit."""

from __future__ import annotations

import threading
import weakref
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gemserve.adapters.table import load_adapter
from gemserve.errors import AdapterBusy, AdapterError, AdapterNotFound, shown
from gemserve.model.adapter import Adapter
from gemserve.model.base import BaseModel, base_of
from gemserve.model.causal import CausalModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Registered:
    """An adapter by name. `version` and `num_bytes` as last loaded; `is_loaded`: now in memory."""

    name: str
    path: str
    kind: str
    version: str
    num_bytes: int
    is_loaded: bool


@dataclass(slots=True)
class _Entry:
    path: str
    kind: str
    version: str
    num_bytes: int
    adapter: Adapter | None


class AdapterStore:
    """Loads folders below `root`; what was not used longest leaves memory first.

    One that left is loaded again when a request names it. A request that runs holds its adapter:
    whatever is loaded or unloaded under that name, it ends with the version it began with, and the
    memory counts until then. Safe to use from several threads; loading blocks others.
    """

    def __init__(self, model: CausalModel, root: Path | None, max_bytes: int) -> None:
        """`root` None: nothing can be loaded."""
        self._model, self._max_bytes = model, max_bytes
        self._root = root.resolve() if root is not None else None
        self._base: BaseModel | None = None
        self._entries: dict[str, _Entry] = {}  # least recently used first
        self._alive: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.Lock()

    @property
    def num_bytes(self) -> int:
        """Memory of all adapters that are loaded or still in use."""
        return sum(adapter.num_bytes for adapter in self._alive)

    def list(self) -> list[Registered]:
        """By name."""
        with self._lock:
            return [
                Registered(
                    name=name,
                    path=entry.path,
                    kind=entry.kind,
                    version=entry.version,
                    num_bytes=entry.num_bytes,
                    is_loaded=entry.adapter is not None,
                )
                for name, entry in sorted(self._entries.items())
            ]

    def load(self, name: str, path: str) -> Registered:
        """Load folder `path`, relative to the root, as `name`, in place of what has that name.

        Raises `AdapterError` and leaves everything as it was; `AdapterBusy` if there is no room.
        """
        with self._lock:
            self._load(name, path)
        return next(entry for entry in self.list() if entry.name == name)

    def unload(self, name: str) -> None:
        """Forget a name. Raises `AdapterNotFound`."""
        with self._lock:
            if self._entries.pop(name, None) is None:
                raise AdapterNotFound(name, self._entries)

    def get(self, name: str) -> Adapter:
        """The adapter to run a request with. Raises `AdapterNotFound`; else as `load`."""
        with self._lock:
            entry = self._entries.get(name)
            if entry is None:
                raise AdapterNotFound(name, self._entries)
            if entry.adapter is None:
                return self._load(name, entry.path)
            self._entries[name] = self._entries.pop(name)
            return entry.adapter

    def _load(self, name: str, path: str) -> Adapter:
        try:
            folder = self._folder(path)
            if self._base is None:
                self._base = base_of(self._model)
            adapter = load_adapter(name, folder, self._model, self._base, self._max_bytes)
        except AdapterError as error:
            raise AdapterError(f"adapter {shown(name)}, path {shown(path)}: {error}") from error
        self._make_room(name, adapter.num_bytes)
        self._alive.add(adapter)
        self._entries.pop(name, None)
        self._entries[name] = _Entry(
            path, type(adapter).__name__.lower(), adapter.version, adapter.num_bytes, adapter
        )
        return adapter

    def _make_room(self, name: str, num_bytes: int) -> None:
        """Let go of adapters until `num_bytes` more fit; what requests hold stays."""
        others = [entry for known, entry in self._entries.items() if known != name]
        replaced = self._entries.get(name)
        for entry in [replaced, *others]:
            if self.num_bytes + num_bytes <= self._max_bytes:
                return
            if entry is not None:
                entry.adapter = None
        if self.num_bytes + num_bytes > self._max_bytes:
            raise AdapterBusy(
                name=name, needed=num_bytes, held=self.num_bytes, limit=self._max_bytes
            )

    def _folder(self, path: str) -> Path:
        """Raises `AdapterError` for what is not plainly below the root."""
        if self._root is None:
            raise AdapterError("this server has no adapter folder; start it with --adapter-dir")
        parts = Path(path).parts
        if not parts or Path(path).is_absolute() or ".." in parts or "\0" in path:
            raise AdapterError("must be relative to the server's adapter folder, without ..")
        folder = self._root
        for part in parts:
            folder = folder / part
            if folder.is_symlink():
                raise AdapterError("symbolic links are not followed")
        return folder
