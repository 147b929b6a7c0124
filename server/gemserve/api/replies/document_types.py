"""The JSON of the replies of /v1/documents."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict  # typing's tells pydantic too little before Python 3.12

from gemserve.api.documents import document_store
from gemserve.api.replies.reply_types import NonNegative
from gemserve.engine.cache.state import StoredDocument


class Document(TypedDict):
    """`tokens`: of the text alone. `cached_tokens`: those that the document cache has now."""

    id: Annotated[str, Field(pattern=document_store.ID_PATTERN)]
    object: Literal["document"]
    name: str | None
    created_at: NonNegative
    expires_at: NonNegative
    bytes: NonNegative
    tokens: NonNegative
    status: document_store.Status
    error: Annotated[str | None, Field(description="Why the warm-up failed.")]
    cached_tokens: NonNegative
    pinned: bool


class Documents(TypedDict):
    """All documents of the key, the oldest first."""

    object: Literal["list"]
    data: list[Document]


class DocumentDeleted(TypedDict):
    id: str
    object: Literal["document"]
    deleted: Literal[True]


class FileText(TypedDict):
    """The text of a file. `pages`: of a PDF; null for a file that is a text already."""

    name: str
    text: str
    pages: NonNegative | None


def document_object(document: document_store.Document, cached: StoredDocument | None) -> Document:
    """`cached`: what the document cache has of it."""
    is_pinned = document.is_pinned
    if document.status != "warming":
        is_pinned = is_pinned and cached is not None and cached.is_pinned
    return {
        "id": document.id,
        "object": "document",
        "name": document.name,
        "created_at": document.created_s,
        "expires_at": document.expires_s,
        "bytes": document.num_bytes,
        "tokens": document.num_tokens,
        "status": document.status,
        "error": document.error,
        "cached_tokens": 0 if cached is None else cached.num_tokens,
        "pinned": is_pinned,
    }
