"""`openai.OpenAI` and `openai.AsyncOpenAI` for a gemserve server.

HTTP, retries, errors and streams are the SDK's. This package adds the request fields `filter` and
`adapter`, the `filter` report of a reply, and the endpoints that only gemserve has.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any, Unpack

from openai import AsyncOpenAI, OpenAI

from gemserve_client.adapters import Adapters, AsyncAdapters
from gemserve_client.address import server_key, server_url
from gemserve_client.chat import AsyncChat, Chat
from gemserve_client.completions import AsyncCompletions, Completions
from gemserve_client.documents import AsyncDocuments, Documents
from gemserve_client.replies import TYPED, Reranked, Scored, Selection
from gemserve_client.requests import RerankRequest, ScoreRequest, SelectionRequest

_SELECTION_PATH, _RERANK_PATH, _SCORE_PATH = "/filter", "/rerank", "/score"


class GemserveClient(OpenAI):
    r"""A client of one gemserve server.

    ```python
    with GemserveClient(base_url="http://127.0.0.1:8000/v1") as client:
        reply = client.chat.completions.create(
            model="builtin",
            messages=[{"role": "user", "content": f"{document}\n\n{question}"}],
            filter={"method": "sieve", "keep": 1024},
        )
        print(reply.choices[0].message.content)
        print(reply.filter.kept_tokens, "of", reply.filter.prompt_tokens)
    ```

    `base_url` falls back to GEMSERVE_URL, then to port 8000 of this machine, and `api_key` to
    GEMSERVE_API_KEY. OpenAI's own variables are not read, so that its key is never sent elsewhere.
    All other options are those of `openai.OpenAI`.
    """

    def __init__(
        self,
        *,
        base_url: str | None = None,
        api_key: str | Callable[[], str] | None = None,
        **options: Any,
    ) -> None:
        # the SDK copies a client with its own kind of URL
        url = server_url(str(base_url) if base_url else None)
        super().__init__(base_url=url, api_key=api_key or server_key(), **options)

    @cached_property
    def chat(self) -> Chat:
        return Chat(self)

    @cached_property
    def completions(self) -> Completions:
        return Completions(self)

    @cached_property
    def adapters(self) -> Adapters:
        return Adapters(self)

    @cached_property
    def documents(self) -> Documents:
        return Documents(self)

    def filter(self, **request: Unpack[SelectionRequest]) -> Selection:
        r"""Return what the server would keep of a prompt, as text. It generates nothing.

        ```python
        selection = client.filter(
            model="builtin",
            messages=[{"role": "user", "content": f"{document}\n\n{question}"}],
            filter={"keep": 512},
        )
        print(selection.text)
        ```
        """
        return self.post(_SELECTION_PATH, cast_to=Selection, body=request)

    def rerank(self, **request: Unpack[RerankRequest]) -> Reranked:
        """Order documents by how relevant they are to a query. It generates nothing.

        ```python
        reranked = client.rerank(query="Who wrote the letter?", documents=passages, top_n=3)
        for result in reranked.results:
            print(result.relevance_score, passages[result.index])
        ```
        """
        return self.post(_RERANK_PATH, cast_to=Reranked, body=request)

    def score(self, **request: Unpack[ScoreRequest]) -> Scored:
        """Return how relevant each document of a pair is to the pair's query.

        ```python
        scored = client.score(text_1="Who wrote the letter?", text_2=passages)
        print([pair.score for pair in scored.data])
        ```
        """
        return self.post(_SCORE_PATH, cast_to=Scored, body=request)

    def request(
        self, cast_to: Any, options: Any, *, stream: bool = False, stream_cls: Any = None
    ) -> Any:
        """Send a request as the SDK does, but build this package's replies instead of its own."""
        typed, typed_stream = (TYPED.get(each, each) for each in (cast_to, stream_cls))
        return super().request(typed, options, stream=stream, stream_cls=typed_stream)


class AsyncGemserveClient(AsyncOpenAI):
    """`GemserveClient` for asyncio, with the same options.

    ```python
    async with AsyncGemserveClient() as client:
        stream = await client.chat.completions.create(
            model="builtin", messages=messages, filter="sieve", stream=True
        )
        async for chunk in stream:
            print(chunk.choices[0].delta.content or "", end="")
    ```
    """

    def __init__(
        self,
        *,
        base_url: str | None = None,
        api_key: str | Callable[[], Awaitable[str]] | None = None,
        **options: Any,
    ) -> None:
        url = server_url(str(base_url) if base_url else None)
        super().__init__(base_url=url, api_key=api_key or server_key(), **options)

    @cached_property
    def chat(self) -> AsyncChat:
        return AsyncChat(self)

    @cached_property
    def completions(self) -> AsyncCompletions:
        return AsyncCompletions(self)

    @cached_property
    def adapters(self) -> AsyncAdapters:
        return AsyncAdapters(self)

    @cached_property
    def documents(self) -> AsyncDocuments:
        return AsyncDocuments(self)

    async def filter(self, **request: Unpack[SelectionRequest]) -> Selection:
        """Return what the server would keep of a prompt, as text. It generates nothing.

        ```python
        selection = await client.filter(model="builtin", prompt=text, filter="sieve")
        ```
        """
        return await self.post(_SELECTION_PATH, cast_to=Selection, body=request)

    async def rerank(self, **request: Unpack[RerankRequest]) -> Reranked:
        """Order documents by how relevant they are to a query. It generates nothing.

        ```python
        reranked = await client.rerank(query="Who wrote the letter?", documents=passages)
        ```
        """
        return await self.post(_RERANK_PATH, cast_to=Reranked, body=request)

    async def score(self, **request: Unpack[ScoreRequest]) -> Scored:
        """Return how relevant each document of a pair is to the pair's query.

        ```python
        scored = await client.score(text_1="Who wrote the letter?", text_2=passages)
        ```
        """
        return await self.post(_SCORE_PATH, cast_to=Scored, body=request)

    async def request(
        self, cast_to: Any, options: Any, *, stream: bool = False, stream_cls: Any = None
    ) -> Any:
        """Send a request as the SDK does, but build this package's replies instead of its own."""
        typed, typed_stream = (TYPED.get(each, each) for each in (cast_to, stream_cls))
        return await super().request(typed, options, stream=stream, stream_cls=typed_stream)
