"""`client.documents` stores texts that requests can name by an id.

The server reads a document in advance, so that the first question about it is answered soon.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any, Unpack
from urllib.parse import quote

from openai import AsyncOpenAI, OpenAI
from openai.pagination import AsyncPage, SyncPage
from openai.types.chat.chat_completion_content_part_param import File
from typing_extensions import TypedDict  # with it, Python 3.11 unpacks types that extend others

from gemserve_client.filters import FilterParam
from gemserve_client.replies import Document

_PATH = "/documents"
_READING = "warming"  # the status of a document until the server has read it
# A request that waited for it would be sent again after the SDK's timeout, and store it once more.
_POLL_S = 0.5


class DocumentRequest(TypedDict, total=False):
    """What a document is stored with.

    `ttl` is the number of seconds after which it expires. With `pin` the server's document cache
    does not give it up before that. `system` is the system message of the questions to come, and
    `filter` and `adapter` are theirs: a question with others has to read the document again. With
    `wait` the call returns when the server has read the document.
    """

    name: str | None
    ttl: int | None
    pin: bool
    system: str | None
    filter: FilterParam | None
    adapter: str | None
    wait: bool


def file_part(document: Document | str) -> File:
    """A part of a message that stands for the document's text."""
    return {"type": "file", "file": {"file_id": _id_of(document)}}


def _id_of(document: Document | str) -> str:
    return document if isinstance(document, str) else document.id


def _path_of(document: Document | str) -> str:
    return f"{_PATH}/{quote(_id_of(document), safe='')}"


class Documents:
    """The documents of this API key.

    ```python
    document = client.documents.create(open("notes.txt").read(), name="notes", wait=True)
    content = [file_part(document), {"type": "text", "text": "Who wrote this?"}]
    reply = client.chat.completions.create(
        model="builtin", messages=[{"role": "user", "content": content}]
    )
    client.documents.delete(document)
    ```
    """

    def __init__(self, client: OpenAI) -> None:
        self._client = client

    def create(self, text: str, **request: Unpack[DocumentRequest]) -> Document:
        """Store a text; the server begins to read it."""
        waits = request.pop("wait", False)
        body: dict[str, Any] = {"text": text, **request}
        made = self._client.post(_PATH, cast_to=Document, body=body)
        while waits and made.status == _READING:
            time.sleep(_POLL_S)
            made = self.retrieve(made)
        return made

    def list(self) -> SyncPage[Document]:
        """All documents of this key, the oldest first."""
        return self._client.get_api_list(_PATH, page=SyncPage[Document], model=Document)

    def retrieve(self, document: Document | str) -> Document:
        """The document as it is now. Raises `openai.NotFoundError` if it is gone."""
        return self._client.get(_path_of(document), cast_to=Document)

    def delete(self, document: Document | str) -> None:
        self._client.delete(_path_of(document), cast_to=object)


class AsyncDocuments:
    """The documents of this API key, for asyncio.

    ```python
    document = await client.documents.create(text, ttl=600)
    async for each in await client.documents.list():
        print(each.id, each.status)
    ```
    """

    def __init__(self, client: AsyncOpenAI) -> None:
        self._client = client

    async def create(self, text: str, **request: Unpack[DocumentRequest]) -> Document:
        """Store a text; the server begins to read it."""
        waits = request.pop("wait", False)
        body: dict[str, Any] = {"text": text, **request}
        made = await self._client.post(_PATH, cast_to=Document, body=body)
        while waits and made.status == _READING:
            await asyncio.sleep(_POLL_S)
            made = await self.retrieve(made)
        return made

    async def list(self) -> AsyncPage[Document]:
        """All documents of this key, the oldest first."""
        return await self._client.get_api_list(_PATH, page=AsyncPage[Document], model=Document)

    async def retrieve(self, document: Document | str) -> Document:
        """The document as it is now. Raises `openai.NotFoundError` if it is gone."""
        return await self._client.get(_path_of(document), cast_to=Document)

    async def delete(self, document: Document | str) -> None:
        await self._client.delete(_path_of(document), cast_to=object)
