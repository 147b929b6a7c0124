"""`client.completions`, whose `create` also takes `filter` and `adapter`."""

from __future__ import annotations

from typing import Any, Unpack, overload

from openai import AsyncStream, Stream, resources

from gemserve_client.replies import Completion
from gemserve_client.requests import CompletionRequest, CompletionStreamRequest, with_ours


class Completions(resources.Completions):
    """The SDK's completions, with `filter` and `adapter`.

    ```python
    reply = client.completions.create(model="builtin", prompt=text, filter={"keep": 0.25})
    print(reply.choices[0].text, reply.filter.kept_tokens)
    ```
    """

    @overload  # type: ignore[override]  # the typed dict lists the same fields as the SDK
    def create(self, **request: Unpack[CompletionRequest]) -> Completion: ...

    @overload
    def create(self, **request: Unpack[CompletionStreamRequest]) -> Stream[Completion]: ...

    def create(self, **request: Any) -> Any:
        return super().create(**with_ours(request))


class AsyncCompletions(resources.AsyncCompletions):
    @overload  # type: ignore[override]
    async def create(self, **request: Unpack[CompletionRequest]) -> Completion: ...

    @overload
    async def create(
        self, **request: Unpack[CompletionStreamRequest]
    ) -> AsyncStream[Completion]: ...

    async def create(self, **request: Any) -> Any:
        return await super().create(**with_ours(request))
