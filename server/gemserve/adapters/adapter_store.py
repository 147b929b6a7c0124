"""Holds the adapters that a server has loaded, by name, under one memory limit."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from gemserve.adapters.find_folder import find_folder
from gemserve.adapters.kinds import load_adapter
from gemserve.contract.adapters import AdapterInfo
from gemserve.errors import AdapterBusy, AdapterError, AdapterNotFound, shown
from gemserve.model.adapter import Adapter
from gemserve.model.base_model import BaseModel, base_of
from gemserve.model.passes.causal_model import CausalModel

_MAX_MESSAGE = 500  # longest name, in characters


@dataclass(slots=True, eq=False)
class _Entry:
    """`kept` is None once evicted. `last` is the same adapter while any request still holds it.

    `is_fixed`: only this version may be loaded again, because other replicas have it.
    """

    path: str
    kept: Adapter | None
    last: Callable[[], Adapter | None]  # a weak reference
    kind: str
    version: str
    num_bytes: int
    num_positions: int
    is_fixed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class PreparedAdapter:
    """An adapter that is in memory, and has no name yet: see `AdapterStore.prepare`."""

    info: AdapterInfo
    entry: _Entry


class AdapterStore:
    """Loads adapters from folders below `root`, and evicts those not used for longest.

    An evicted adapter is loaded again from its folder when a request names it. A request holds its
    adapter to its end, whatever is loaded or unloaded under that name meanwhile. The adapter's
    memory counts until then. Several threads may use the store. One folder is loaded at a time, and
    nothing else waits for that.
    """

    def __init__(self, model: CausalModel, root: Path | None, max_bytes: int) -> None:
        """`root` None: no adapter can be loaded."""
        self._model, self._max_bytes = model, max_bytes
        # a file has a header, and may have float32 for a model in half precision
        self._max_file_bytes = 2 * max_bytes + (1 << 20)
        self._root = root.resolve() if root is not None else None
        self._base: BaseModel | None = None
        self._entries: dict[str, _Entry] = {}  # least recently used first
        self._alive: list[weakref.ref[Adapter]] = []
        self._lock = threading.Lock()  # guards the entries, and is held for moments
        self._loading = threading.Lock()  # taken before `_lock`

    @property
    def num_bytes(self) -> int:
        """Memory of all adapters that are loaded or still in use."""
        with self._lock:
            return self._held_bytes()

    @property
    def num_loaded(self) -> int:
        with self._lock:
            return sum(entry.last() is not None for entry in self._entries.values())

    def list(self) -> list[AdapterInfo]:
        """All adapters, sorted by name."""
        with self._lock:
            return [_registered(name, entry) for name, entry in sorted(self._entries.items())]

    def describe(self, name: str) -> AdapterInfo:
        """Raises `AdapterNotFound`."""
        with self._lock:
            return _registered(name, self._known(name))

    def load(self, name: str, path: str) -> AdapterInfo:
        """Load folder `path`, relative to the root, as `name`; it replaces an adapter of that name.

        Raises `AdapterError`, or `AdapterBusy` if there is no room. The names are then as before.
        """
        with self._loading:
            adapter = self._read(name, path)
            with self._lock:
                entry = self._admit(name, path, adapter)
                self._put(name, entry)
                return _registered(name, entry)

    def prepare(self, name: str, path: str) -> PreparedAdapter:
        """The first half of `load`; `keep` is the second one. Raises what `load` raises."""
        with self._loading:
            adapter = self._read(name, path)
            with self._lock:
                entry = self._admit(name, path, adapter)
                return PreparedAdapter(_registered(name, entry), entry)

    def keep(self, prepared: PreparedAdapter) -> None:
        """Give an adapter its name, in place of one that has it."""
        with self._lock:
            self._put(prepared.info.name, prepared.entry)

    def adopt(self, wanted: AdapterInfo) -> None:
        """Have the adapter that another replica has: from now on no other version gets this name.

        Raises what `load` raises. The name is known then, too, and the next request that names it
        loads it, if it can.
        """
        name = wanted.name
        with self._lock:
            entry = self._entries.get(name)
            if entry is None or (entry.path, entry.version) != (wanted.path, wanted.version):
                entry = _Entry(
                    path=wanted.path,
                    kept=None,
                    last=_no_adapter,
                    kind=wanted.kind,
                    version=wanted.version,
                    num_bytes=wanted.num_bytes,
                    num_positions=wanted.num_positions,
                )
                self._put(name, entry)
            entry.is_fixed = True
        if entry.last is _no_adapter:
            self.get(name)

    def unload(self, name: str) -> None:
        """Forget a name. Raises `AdapterNotFound`."""
        with self._lock:
            self._known(name)
            del self._entries[name]

    def find(self, name: str) -> Adapter | None:
        """The adapter for a request, if it is in memory. Raises `AdapterNotFound`."""
        with self._lock:
            entry = self._known(name)
            self._put(name, entry)
            entry.kept = entry.last()  # it may have been evicted while a request holds it
            return entry.kept

    def get(self, name: str) -> Adapter:
        """The adapter for a request; it is loaded if necessary.

        Raises `AdapterNotFound`, or what `load` raises.
        """
        adapter = self.find(name)
        if adapter is not None:
            return adapter
        with self._loading:
            adapter = self.find(name)  # another request may have loaded it in the meantime
            if adapter is not None:
                return adapter
            with self._lock:
                before = self._known(name)
            adapter = self._read(name, before.path)
            if before.is_fixed and adapter.version != before.version:
                raise AdapterError(
                    f"adapter {shown(name)}, path {shown(before.path)}: has version "
                    f"{adapter.version}, and other replicas have {before.version}"
                )
            with self._lock:
                entry = self._admit(name, before.path, adapter)
                entry.is_fixed = before.is_fixed
                if self._entries.get(name) is before:  # it was not unloaded in the meantime
                    self._put(name, entry)
            return adapter

    def _read(self, name: str, path: str) -> Adapter:
        """The content of a folder. Raises `AdapterError`."""
        try:
            if self._root is None:
                raise AdapterError("this server has no adapter folder; start it with --adapter-dir")
            folder = find_folder(self._root, path)
            if self._base is None:
                self._base = base_of(self._model)
            adapter = load_adapter(name, folder, self._model, self._base, self._max_file_bytes)
            if adapter.num_bytes > self._max_bytes:
                raise AdapterError(
                    f"needs {adapter.num_bytes} bytes; all adapters may take {self._max_bytes}"
                )
            return adapter
        except (AdapterError, OSError, RuntimeError, MemoryError) as error:
            message = " ".join(str(error).split()) or type(error).__name__
            message = message if len(message) <= _MAX_MESSAGE else f"{message[:_MAX_MESSAGE]}…"
            raise AdapterError(f"adapter {shown(name)}, path {shown(path)}: {message}") from error

    def _admit(self, name: str, path: str, adapter: Adapter) -> _Entry:
        """Reserve memory for `adapter`. Raises `AdapterBusy`."""
        self._make_room(name, adapter.num_bytes)
        last = weakref.ref(adapter)
        self._alive.append(last)
        return _Entry(
            path=path,
            kept=adapter,
            last=last,
            kind=type(adapter).__name__.lower(),
            version=adapter.version,
            num_bytes=adapter.num_bytes,
            num_positions=adapter.num_positions,
        )

    def _make_room(self, name: str, num_bytes: int) -> None:
        """Evict adapters until `num_bytes` more fit. Adapters that requests hold stay in memory."""
        replaced_first = sorted(self._entries.items(), key=lambda item: item[0] != name)
        for _, entry in replaced_first:
            if self._held_bytes() + num_bytes <= self._max_bytes:
                return
            entry.kept = None
        held = self._held_bytes()
        if held + num_bytes > self._max_bytes:
            for entry in self._entries.values():
                entry.kept = entry.last()  # undo the evictions: they freed too little
            raise AdapterBusy(name=name, needed=num_bytes, held=held, limit=self._max_bytes)

    def _put(self, name: str, entry: _Entry) -> None:
        """Store an entry as the most recently used one."""
        self._entries.pop(name, None)
        self._entries[name] = entry

    def _known(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise AdapterNotFound(name, self._entries)
        return entry

    def _held_bytes(self) -> int:
        self._alive = [last for last in self._alive if last() is not None]
        adapters = [last() for last in self._alive]
        return sum(adapter.num_bytes for adapter in adapters if adapter is not None)


def _no_adapter() -> None:
    """Stands for a weak reference where there never was an adapter."""


def _registered(name: str, entry: _Entry) -> AdapterInfo:
    return AdapterInfo(
        name=name,
        path=entry.path,
        kind=entry.kind,
        version=entry.version,
        num_bytes=entry.num_bytes,
        num_positions=entry.num_positions,
        is_loaded=entry.last() is not None,
    )
