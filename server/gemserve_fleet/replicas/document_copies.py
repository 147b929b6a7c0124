"""The stored documents of all replicas, as the ingress knows them.

A document is read in advance by the replica on which it was stored. The ingress keeps its text and
gives it to any other replica that a request needs it on. So an id works wherever a request lands,
also after the replica that has read it has died.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from gemserve_fleet.replicas.messages import DocumentCopy

PATH = "/v1/documents"
# JSON may write any character by its code.
_ID = re.compile(
    rb"(?:d|\\u0064)(?:o|\\u006[fF])(?:c|\\u0063)(?:-|\\u002[dD])"
    rb"(?:[0-9a-f]|\\u00(?:3[0-9]|6[1-6])){32}"
)
_LONGEST_ID = 36 * len(r"\u0064")
_AT_ONCE = 1 << 18  # bytes of a body: no other thread runs while they are searched
_GONE_S = 120.0  # in which late messages have come, and replicas that hang were killed
_MOST_GONE = 256  # deleted ids of a key, which go with each of its requests


class DocumentCopies:
    """Copies by tenant and id. Those that were deleted are remembered for a while."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._copies: dict[bytes, dict[str, DocumentCopy]] = {}
        self._ends_s: dict[str, float] = {}  # by id, when it expires
        self._gone: dict[bytes, dict[str, float]] = {}  # until when they are remembered

    def __len__(self) -> int:
        """How many there are, and how many deleted ones are remembered."""
        return len(self._ends_s) + sum(map(len, self._gone.values()))

    def add(self, tenant: bytes, copies: Sequence[DocumentCopy]) -> None:
        self.drop_expired()
        gone = self._gone.get(tenant, {})
        for copy in copies:
            if copy.id not in gone:
                self._copies.setdefault(tenant, {})[copy.id] = copy
                self._ends_s.setdefault(copy.id, self._clock() + copy.left_s)

    def remove(self, tenant: bytes, document_id: str) -> None:
        self.drop_expired()
        if document_id not in self._copies.get(tenant, {}):
            return
        del self._copies[tenant][document_id]
        gone = self._gone.setdefault(tenant, {})
        gone[document_id] = min(self._ends_s.pop(document_id), self._clock() + _GONE_S)
        if len(gone) > _MOST_GONE:
            del gone[next(iter(gone))]

    def find(self, tenant: bytes, ids: Sequence[str]) -> list[DocumentCopy]:
        now_s, known = self._clock(), self._living(tenant)
        found = [known[each] for each in ids if each in known]
        return [replace(copy, left_s=self._ends_s[copy.id] - now_s) for copy in found]

    def ids(self, tenant: bytes) -> frozenset[str]:
        return frozenset(self._living(tenant))

    def needed(self, tenant: bytes, path: str, named: Sequence[str]) -> tuple[str, ...]:
        """The documents that a replica must have for a request whose body has `named` ids."""
        known = self._living(tenant)
        if path == PATH or path.startswith(f"{PATH}/"):  # lists and limits are about all of them
            return tuple(known)
        return tuple(each for each in named if each in known)

    def gone(self, tenant: bytes) -> tuple[str, ...]:
        """Those that a replica may still have."""
        now_s = self._clock()
        return tuple(each for each, ends_s in self._gone.get(tenant, {}).items() if ends_s > now_s)

    def drop_expired(self) -> None:
        """Drop what has expired, of all tenants: they may never ask again."""
        now_s = self._clock()
        self._copies = {each: known for each in self._copies if (known := self._living(each))}
        self._ends_s = {each: ends_s for each, ends_s in self._ends_s.items() if ends_s > now_s}
        for tenant in list(self._gone):
            left = {each: ends_s for each, ends_s in self._gone[tenant].items() if ends_s > now_s}
            if left:
                self._gone[tenant] = left
            else:
                del self._gone[tenant]

    def _living(self, tenant: bytes) -> dict[str, DocumentCopy]:
        now_s, known = self._clock(), self._copies.get(tenant, {})
        return {each: copy for each, copy in known.items() if self._ends_s[each] > now_s}


def ids_in(body: bytes, known: Collection[str]) -> list[str]:
    """Those of the `known` ids that are in the text of a JSON body, each once."""
    found: dict[str, None] = {}
    for start in range(0, len(body), _AT_ONCE):
        for match in _ID.finditer(body, start, start + _AT_ONCE + _LONGEST_ID):
            document_id = match[0].decode("unicode_escape")
            if document_id in known:
                found[document_id] = None
    return list(found)
