"""Finds the documents that a request names by their ids."""

from __future__ import annotations

from gemserve.api.documents.document_store import Document, DocumentStore
from gemserve.errors import DocumentNotFound, RequestError

# A request may name one document often. It must not become larger than a body usually may be.
MOST_CHARS = 64 << 20


class Finder:
    """Finds a tenant's documents for one request, and remembers which it has found."""

    def __init__(self, store: DocumentStore, tenant: bytes) -> None:
        self._store = store
        self._tenant = tenant
        self._found: dict[str, None] = {}
        self._num_chars = 0

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the documents that were found, each once."""
        return tuple(self._found)

    @property
    def num_chars(self) -> int:
        """Characters of the documents, each counted as often as it was found."""
        return self._num_chars

    def find(self, document_id: str) -> Document | None:
        """Raises `RequestError` if the request would become too large with its documents."""
        document = self._store.find(self._tenant, document_id)
        if document is not None:
            self._found[document_id] = None
            self._num_chars += len(document.text)
            check_chars(self._num_chars)
        return document

    def check_still_there(self) -> None:
        """Raise `DocumentNotFound` if a document has gone since it was found."""
        for document_id in self._found:
            if self._store.find(self._tenant, document_id) is None:
                raise DocumentNotFound(document_id, param="document_id")


def check_chars(num_chars: int) -> None:
    """Raise `RequestError` if a request with so much text of documents is too large."""
    if num_chars > MOST_CHARS:
        raise RequestError(
            f"documents: all that the request names have more than {MOST_CHARS} characters "
            "together, each counted as often as it is named",
            param=None,
            code="body_too_large",
        )
