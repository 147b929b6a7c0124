"""Finds the documents that a request names by their ids."""

from __future__ import annotations

from gemserve.api.documents.store import Document, DocumentStore
from gemserve.errors import DocumentNotFound


class Finder:
    """Finds a tenant's documents for one request, and remembers which it has found."""

    def __init__(self, store: DocumentStore, tenant: bytes) -> None:
        self._store = store
        self._tenant = tenant
        self._found: dict[str, None] = {}

    @property
    def ids(self) -> tuple[str, ...]:
        """The ids of the documents that were found, each once."""
        return tuple(self._found)

    def find(self, document_id: str) -> Document | None:
        document = self._store.find(self._tenant, document_id)
        if document is not None:
            self._found[document_id] = None
        return document

    def check_still_there(self) -> None:
        """Raise `DocumentNotFound` if a document has gone since it was found."""
        for document_id in self._found:
            if self._store.find(self._tenant, document_id) is None:
                raise DocumentNotFound(document_id, param="document_id")
