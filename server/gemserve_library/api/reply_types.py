"""The JSON of the replies of /v1/libraries."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field
from typing_extensions import TypedDict  # typing's tells pydantic too little before Python 3.12

from gemserve.api.replies.reply_types import NonNegative
from gemserve_library.api import shelf, uploads
from gemserve_library.library import StoredFile


class Library(TypedDict):
    """`bytes`: on disk. `model`: whose keys it has."""

    id: str
    object: Literal["library"]
    files: NonNegative
    windows: NonNegative
    tokens: NonNegative
    bytes: NonNegative
    model: str | None
    reading: Annotated[NonNegative, Field(description="Files that are being read.")]
    error: Annotated[str | None, Field(description="Why it cannot be asked.")]


class Libraries(TypedDict):
    """All libraries of the key, by name."""

    object: Literal["list"]
    data: list[Library]


class LibraryDeleted(TypedDict):
    id: str
    object: Literal["library"]
    deleted: Literal[True]


class LibraryFile(TypedDict):
    """`tokens`: of the whole file; while it is being read, those that are read."""

    id: str
    object: Literal["library.file"]
    library: str
    bytes: NonNegative
    tokens: NonNegative
    windows: NonNegative
    created_at: NonNegative
    status: uploads.Status
    error: Annotated[str | None, Field(description="Why it was not read.")]


class LibraryFiles(TypedDict):
    """All files of a library, by path, and those that are being read or failed last."""

    object: Literal["list"]
    data: list[LibraryFile]


class LibraryFileDeleted(TypedDict):
    id: str
    object: Literal["library.file"]
    deleted: Literal[True]


def library_object(described: shelf.Description, num_reading: int) -> Library:
    return {
        "id": described.name,
        "object": "library",
        "files": described.files,
        "windows": described.segments,
        "tokens": described.tokens,
        "bytes": described.num_bytes,
        "model": described.model,
        "reading": num_reading,
        "error": described.error,
    }


def file_object(library: str, file: StoredFile) -> LibraryFile:
    return {
        "id": file.path,
        "object": "library.file",
        "library": library,
        "bytes": file.num_bytes,
        "tokens": file.num_tokens,
        "windows": file.num_windows,
        "created_at": file.added_s,
        "status": "ready",
        "error": None,
    }


def upload_object(library: str, upload: uploads.Upload) -> LibraryFile:
    return {
        "id": upload.path,
        "object": "library.file",
        "library": library,
        "bytes": upload.num_bytes,
        "tokens": upload.num_tokens,
        "windows": 0,
        "created_at": upload.created_s,
        "status": upload.status,
        "error": upload.error,
    }
