"""The stored documents of all replicas, as the ingress knows them.

A document is read in advance by the replica on which it was stored. The ingress keeps its text and
gives it to any other replica that a request needs it on. So an id works wherever a request lands,
also after the replica that has read it has died.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from gemserve_fleet.replicas.messages import DocumentCopy

PATH = "/v1/documents"
_ID = re.compile(rb"doc-[0-9a-f]{32}")
_ESCAPED = re.compile(rb"\\u00([2-7][0-9a-fA-F])")  # JSON may write any character so


class DocumentCopies:
    """Copies by tenant and id. Those that were deleted are remembered until they would expire."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._copies: dict[bytes, dict[str, DocumentCopy]] = {}
        self._ends_s: dict[str, float] = {}  # by id, when it expires
        self._gone: dict[bytes, dict[str, float]] = {}  # when they would have expired

    def add(self, tenant: bytes, copies: Sequence[DocumentCopy]) -> None:
        gone = self._gone.get(tenant, {})
        known = self._copies.setdefault(tenant, {})
        for copy in copies:
            if copy.id not in gone:
                known[copy.id] = copy
                self._ends_s.setdefault(copy.id, self._clock() + copy.left_s)

    def remove(self, tenant: bytes, document_id: str) -> None:
        copy = self._copies.get(tenant, {}).pop(document_id, None)
        if copy is not None:
            self._gone.setdefault(tenant, {})[document_id] = self._ends_s.pop(document_id)

    def find(self, tenant: bytes, ids: Sequence[str]) -> list[DocumentCopy]:
        known = self._living(tenant)
        return self._as_sent(known[each] for each in ids if each in known)

    def needed(self, tenant: bytes, path: str, body: bytes) -> list[DocumentCopy]:
        """The documents that a replica must have for this request."""
        known = self._living(tenant)
        if path == PATH or path.startswith(f"{PATH}/"):  # lists and limits are about all of them
            return self._as_sent(known.values())
        if not known:
            return []
        return self._as_sent(known[each] for each in dict.fromkeys(_ids_in(body)) if each in known)

    def gone(self, tenant: bytes) -> tuple[str, ...]:
        """Those that a replica may still have."""
        now_s, gone = self._clock(), self._gone.get(tenant, {})
        for document_id in [each for each, ends_s in gone.items() if ends_s <= now_s]:
            del gone[document_id]
        if not gone:
            self._gone.pop(tenant, None)
        return tuple(gone)

    def _living(self, tenant: bytes) -> dict[str, DocumentCopy]:
        now_s, known = self._clock(), self._copies.get(tenant, {})
        for document_id in [each for each in known if self._ends_s[each] <= now_s]:
            del known[document_id], self._ends_s[document_id]
        if not known:
            self._copies.pop(tenant, None)
        return known

    def _as_sent(self, copies: Iterable[DocumentCopy]) -> list[DocumentCopy]:
        now_s = self._clock()
        return [replace(copy, left_s=self._ends_s[copy.id] - now_s) for copy in copies]


def _ids_in(body: bytes) -> list[str]:
    if b"\\u00" in body:
        body = _ESCAPED.sub(lambda match: bytes.fromhex(match[1].decode()), body)
    return [match.decode() for match in _ID.findall(body)]
