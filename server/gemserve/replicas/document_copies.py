"""The stored documents of all replicas, as the ingress knows them.

A document is read in advance by the replica on which it was stored. The ingress keeps its text and
gives it to any other replica that a request needs it on. So an id works wherever a request lands,
also after the replica that has read it has died.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Sequence

from gemserve.replicas.messages import DocumentCopy

PATH = "/v1/documents"
_ID = re.compile(rb"doc-[0-9a-f]{32}")
_ESCAPED = re.compile(rb"\\u00([2-7][0-9a-fA-F])")  # JSON may write any character so


class DocumentCopies:
    """Copies by tenant and id. Those that were deleted are remembered until they would expire."""

    def __init__(self, clock: Callable[[], float] = time.time) -> None:
        self._clock = clock
        self._copies: dict[bytes, dict[str, DocumentCopy]] = {}
        self._gone: dict[bytes, dict[str, int]] = {}  # when they would have expired

    def add(self, tenant: bytes, copies: Sequence[DocumentCopy]) -> None:
        gone = self._gone.get(tenant, {})
        known = self._copies.setdefault(tenant, {})
        known.update({copy.id: copy for copy in copies if copy.id not in gone})

    def remove(self, tenant: bytes, document_id: str) -> None:
        copy = self._copies.get(tenant, {}).pop(document_id, None)
        if copy is not None:
            self._gone.setdefault(tenant, {})[document_id] = copy.expires_s

    def find(self, tenant: bytes, ids: Sequence[str]) -> list[DocumentCopy]:
        known = self._living(tenant)
        return [known[each] for each in ids if each in known]

    def needed(self, tenant: bytes, path: str, body: bytes) -> list[DocumentCopy]:
        """The documents that a replica must have for this request."""
        known = self._living(tenant)
        if path == PATH or path.startswith(f"{PATH}/"):  # lists and limits are about all of them
            return list(known.values())
        if not known:
            return []
        return [known[each] for each in dict.fromkeys(_ids_in(body)) if each in known]

    def gone(self, tenant: bytes) -> tuple[str, ...]:
        """Those that a replica may still have."""
        now_s, gone = self._clock(), self._gone.get(tenant, {})
        for document_id in [each for each, expires_s in gone.items() if expires_s <= now_s]:
            del gone[document_id]
        if not gone:
            self._gone.pop(tenant, None)
        return tuple(gone)

    def _living(self, tenant: bytes) -> dict[str, DocumentCopy]:
        now_s, known = self._clock(), self._copies.get(tenant, {})
        for document_id in [copy.id for copy in known.values() if copy.expires_s <= now_s]:
            del known[document_id]
        if not known:
            self._copies.pop(tenant, None)
        return known


def _ids_in(body: bytes) -> list[str]:
    if b"\\u00" in body:
        body = _ESCAPED.sub(lambda match: bytes.fromhex(match[1].decode()), body)
    return [match.decode() for match in _ID.findall(body)]
