"""The adapters of one of several replicas, which must all have the same.

`POST /v1/adapters` only loads an adapter here. When all replicas have loaded it, the ingress has
each of them `adopt` the adapters that all have from then on.
"""

from __future__ import annotations

import logging
import threading

from gemserve.adapters.adapter_store import AdapterStore, PreparedAdapter
from gemserve.contract.adapters import AdapterInfo
from gemserve.errors import AdapterBusy, AdapterError, GemserveError
from gemserve_fleet.replicas.messages import AdapterSet

log = logging.getLogger("gemserve_fleet.replicas")


class StagedAdapters:
    """Changes the adapters of `store`. Several threads may call it."""

    def __init__(self, store: AdapterStore) -> None:
        self._store = store
        self._staged: PreparedAdapter | None = None
        self._revision = 0  # of the set that was adopted last
        self._lock = threading.Lock()

    def stage(self, name: str, path: str) -> AdapterInfo:
        """Load an adapter without naming it, in place of one that was staged before.

        Raises what `AdapterStore.load` raises.
        """
        self.drop()
        prepared = self._store.prepare(name, path)
        self._staged = prepared
        return prepared.info

    def drop(self) -> None:
        """Let go of what is staged. Idempotent."""
        self._staged = None

    def current(self) -> AdapterSet:
        """The adapters here. Revision 0: no set has been adopted."""
        return AdapterSet(self._revision, tuple(self._store.list()))

    def load(self, name: str, path: str) -> str | None:
        """Load an adapter before any set is adopted. Why it cannot be loaded, if it cannot."""
        try:
            self._store.load(name, path)
        except (AdapterError, AdapterBusy) as error:
            return str(error)
        return None

    def adopt(self, wanted: AdapterSet) -> None:
        """Have these adapters and no others. An older set than the one here is not adopted.

        One that cannot be loaded any more is known, and requests that name it are told why.
        """
        with self._lock:
            if wanted.revision < self._revision:
                return
            staged, self._staged = self._staged, None
            names = {info.name for info in wanted.adapters}
            for known in self._store.list():
                if known.name not in names:
                    self._store.unload(known.name)
            for info in wanted.adapters:
                if staged is not None and _is_same(staged.info, info):
                    self._store.keep(staged)
                try:
                    self._store.adopt(info)
                except GemserveError as error:
                    log.warning("%s; requests that name it will try again", error)
            self._revision = wanted.revision


def _is_same(one: AdapterInfo, other: AdapterInfo) -> bool:
    return (one.name, one.path, one.version) == (other.name, other.path, other.version)
