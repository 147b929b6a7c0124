"""`client.chat.completions`, whose `create` also takes `filter` and `adapter`."""

from __future__ import annotations

from functools import cached_property
from typing import Any, Unpack, overload

from openai import AsyncStream, Stream
from openai.resources import chat

from gemserve_client.replies import ChatCompletion, ChatCompletionChunk
from gemserve_client.requests import ChatRequest, ChatStreamRequest, with_ours


class ChatCompletions(chat.Completions):
    """The SDK's chat completions, with `filter` and `adapter`.

    ```python
    stream = client.chat.completions.create(
        model="builtin", messages=messages, filter="sieve", adapter="legal", stream=True
    )
    for chunk in stream:
        if chunk.filter is not None:  # the first chunk of each choice has the report
            print(chunk.filter.kept_tokens)
    ```
    """

    @overload  # type: ignore[override]  # the typed dict lists the same fields as the SDK
    def create(self, **request: Unpack[ChatRequest]) -> ChatCompletion: ...

    @overload
    def create(self, **request: Unpack[ChatStreamRequest]) -> Stream[ChatCompletionChunk]: ...

    def create(self, **request: Any) -> Any:
        return super().create(**with_ours(request))


class Chat(chat.Chat):
    @cached_property
    def completions(self) -> ChatCompletions:
        return ChatCompletions(self._client)


class AsyncChatCompletions(chat.AsyncCompletions):
    @overload  # type: ignore[override]
    async def create(self, **request: Unpack[ChatRequest]) -> ChatCompletion: ...

    @overload
    async def create(
        self, **request: Unpack[ChatStreamRequest]
    ) -> AsyncStream[ChatCompletionChunk]: ...

    async def create(self, **request: Any) -> Any:
        return await super().create(**with_ours(request))


class AsyncChat(chat.AsyncChat):
    @cached_property
    def completions(self) -> AsyncChatCompletions:
        return AsyncChatCompletions(self._client)
