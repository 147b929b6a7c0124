"""`client.adapters` lists, loads and unloads the adapters that requests can name.

If the server has keys, loading and unloading need an administrator's key.
"""

from __future__ import annotations

from urllib.parse import quote

from openai import AsyncOpenAI, OpenAI
from openai.pagination import AsyncPage, SyncPage

from gemserve_client.replies import Adapter

_PATH = "/adapters"


def _path_of(name: str) -> str:
    return f"{_PATH}/{quote(name, safe='')}"


class Adapters:
    """The server's adapters.

    ```python
    client.adapters.load(name="legal", path="legal-v2")
    print([adapter.name for adapter in client.adapters.list()])
    reply = client.chat.completions.create(model="builtin", messages=messages, adapter="legal")
    client.adapters.unload("legal")
    ```
    """

    def __init__(self, client: OpenAI) -> None:
        self._client = client

    def list(self) -> SyncPage[Adapter]:
        return self._client.get_api_list(_PATH, page=SyncPage[Adapter], model=Adapter)

    def load(self, *, name: str, path: str) -> Adapter:
        """Load an adapter, in place of any with this name.

        `path` is relative to the server's adapter folder.
        """
        return self._client.post(_PATH, cast_to=Adapter, body={"name": name, "path": path})

    def unload(self, name: str) -> None:
        self._client.delete(_path_of(name), cast_to=object)


class AsyncAdapters:
    """The server's adapters, for asyncio.

    ```python
    await client.adapters.load(name="legal", path="legal-v2")
    async for adapter in await client.adapters.list():
        print(adapter.name)
    ```
    """

    def __init__(self, client: AsyncOpenAI) -> None:
        self._client = client

    async def list(self) -> AsyncPage[Adapter]:
        return await self._client.get_api_list(_PATH, page=AsyncPage[Adapter], model=Adapter)

    async def load(self, *, name: str, path: str) -> Adapter:
        """Load an adapter, in place of any with this name.

        `path` is relative to the server's adapter folder.
        """
        return await self._client.post(_PATH, cast_to=Adapter, body={"name": name, "path": path})

    async def unload(self, name: str) -> None:
        await self._client.delete(_path_of(name), cast_to=object)
