"""The documents that clients have stored: texts in memory, each of one API key and for some time.

Only the event loop changes the store. Any thread may look for a document.
"""

from __future__ import annotations

import asyncio
import math
import secrets
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

from gemserve.config import ServerConfig
from gemserve.errors import DocumentNotFound, RequestError

# For questions one after the other. Who wants a document for longer says so in `ttl`.
DEFAULT_TTL_S = 3600
MOST_TTL_S = 86400  # texts are held in memory; what should stay for longer belongs into a library
ID_PATTERN = "^doc-[0-9a-f]{32}$"
Status = Literal["warming", "ready", "failed"]


def new_document_id() -> str:
    """An id that nobody can guess."""
    return f"doc-{secrets.token_hex(16)}"


def held_bytes(text: str) -> int:
    """Bytes of memory that a text takes.

    Python keeps four for each character if one of them is an emoji, and beside it the text as
    UTF-8, once somebody has asked for that: whoever validates or tokenizes it does.
    """
    return sys.getsizeof(text)


def _nothing() -> None:
    pass


@dataclass(slots=True, eq=False, kw_only=True)
class Document:
    """A stored text. `created_s` and `expires_s` are Unix times in seconds, as clients see them.

    `ends_s`: when it expires, of `time.monotonic()`, set by the store. The wall clock may be set to
    another time. `num_tokens`: tokens of the text alone. `is_pinned`: whether the cache should not
    give it up.
    `error`: why the warm-up failed. `is_settled` is set when the warm-up has ended. `cancel` ends
    the warm-up.
    """

    id: str
    text: str
    num_bytes: int
    num_tokens: int
    name: str | None
    created_s: int
    expires_s: int
    is_pinned: bool
    status: Status = "warming"
    error: str | None = None
    is_settled: asyncio.Event = field(default_factory=asyncio.Event)
    cancel: Callable[[], None] = _nothing
    timer: asyncio.TimerHandle | None = None
    ends_s: float = math.inf

    def settle(self, status: Status, error: str | None = None) -> None:
        """The warm-up has ended."""
        self.status, self.error = status, error
        self.cancel = _nothing
        self.is_settled.set()


@dataclass(frozen=True, slots=True, kw_only=True)
class Wish:
    """What a client wants to store, as far as limits know it.

    `num_bytes`: as UTF-8. `memory_bytes`: see `held_bytes`. `ttl_s` None: the default.
    """

    num_bytes: int
    memory_bytes: int
    ttl_s: int | None
    is_pinned: bool


class DocumentStore:
    """Documents by tenant and id. Nobody finds a document of another tenant."""

    def __init__(
        self, config: ServerConfig, forget: Callable[[Sequence[str]], Future[None]]
    ) -> None:
        """`forget` has the cache drop what it holds of these documents."""
        self._config = config
        self._forget = forget
        self._by_tenant: dict[bytes, dict[str, Document]] = {}

    def ttl_s(self, wish: Wish) -> int:
        """How long the document stays. `check` refuses wishes that are too long."""
        return DEFAULT_TTL_S if wish.ttl_s is None else wish.ttl_s

    def check(self, tenant: bytes, wish: Wish) -> None:
        """Raise `RequestError` if a limit forbids to store this."""
        config, held = self._config, self.list(tenant)
        if not 1 <= self.ttl_s(wish) <= MOST_TTL_S:
            raise RequestError(
                f"ttl={wish.ttl_s}: must be from 1 to {MOST_TTL_S} seconds", param="ttl"
            )
        if wish.num_bytes > config.max_document_bytes:
            raise RequestError(
                f"text: has {wish.num_bytes} bytes, the limit is {config.max_document_bytes} "
                "(--max-document-bytes)",
                param="text",
                code="document_too_large",
            )
        if len(held) >= config.max_documents:
            raise RequestError(
                f"documents: this key has {len(held)}, the limit is {config.max_documents} "
                "(--max-documents); delete one first",
                param=None,
                code="too_many_documents",
            )
        used = sum(held_bytes(document.text) for document in held)
        if used + wish.memory_bytes > config.document_memory_bytes:
            raise RequestError(
                f"text: takes {wish.memory_bytes} bytes of memory; this key's documents have "
                f"{used} of the {config.document_memory_bytes} that they may have",
                param="text",
                code="document_memory_full",
            )
        num_pinned = sum(document.is_pinned for document in held)
        if wish.is_pinned and num_pinned >= config.max_pinned_documents:
            raise RequestError(
                f"pin=true: this key has {num_pinned} pinned documents, the limit is "
                f"{config.max_pinned_documents}",
                param="pin",
                code="too_many_documents",
            )

    def add(self, tenant: bytes, document: Document, left_s: float | None = None) -> None:
        """Store what `check` allows, until it expires. Call it on the event loop.

        `left_s`: seconds until then; None: what the wall clock says, for a new document.
        """
        self._by_tenant.setdefault(tenant, {})[document.id] = document
        seconds = max(0.0, document.expires_s - time.time() if left_s is None else left_s)
        document.ends_s = time.monotonic() + seconds
        loop = asyncio.get_running_loop()
        document.timer = loop.call_later(seconds, self.drop_expired)

    def find(self, tenant: bytes, document_id: str) -> Document | None:
        document = self._by_tenant.get(tenant, {}).get(document_id)
        return None if document is None or self._is_expired(document) else document

    def list(self, tenant: bytes) -> list[Document]:
        """The tenant's documents, the oldest first."""
        held = list(self._by_tenant.get(tenant, {}).values())
        return [document for document in held if not self._is_expired(document)]

    def delete(self, tenant: bytes, document_id: str) -> Future[None]:
        """The future ends when the cache has dropped it, too. Raises `DocumentNotFound`."""
        if self.find(tenant, document_id) is None:
            raise DocumentNotFound(document_id, param="document_id")
        return self._drop(tenant, [document_id])

    def drop_expired(self) -> None:
        for tenant, documents in list(self._by_tenant.items()):
            gone = [each.id for each in documents.values() if self._is_expired(each)]
            if gone:
                self._drop(tenant, gone)

    def _drop(self, tenant: bytes, ids: Sequence[str]) -> Future[None]:
        documents = self._by_tenant[tenant]
        for document_id in ids:
            document = documents.pop(document_id)
            document.cancel()
            if document.timer is not None:
                document.timer.cancel()
        if not documents:
            del self._by_tenant[tenant]
        return self._forget(ids)

    def _is_expired(self, document: Document) -> bool:
        return document.ends_s <= time.monotonic()
