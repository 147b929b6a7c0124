"""Request body of /v1/documents."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gemserve.api.requests.base_bodies import Body, FilteringBody
from gemserve.api.requests.integers import Count
from gemserve.errors import RequestError

MAX_NAME_CHARS = 256


class ExpiresAfter(Body):
    """When a document expires, as OpenAI's files say it."""

    anchor: Literal["created_at"]
    seconds: Count


class DocumentBody(FilteringBody):
    """A text to store. `system`: the system message of the chats that will begin with it.

    `wait`: the reply comes when the warm-up has ended. `purpose` has no effect.
    """

    model: str | None = None  # type: ignore[assignment]
    text: Annotated[str, Field(min_length=1)]
    name: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    ttl: Annotated[Count, Field(description="Seconds until the document expires.")] | None = None
    expires_after: ExpiresAfter | None = None
    pin: bool | None = None
    wait: bool | None = None
    system: str | None = None
    purpose: str | None = None

    @property
    def ttl_s(self) -> int | None:
        """Raises `RequestError` if it is given twice."""
        if self.expires_after is None:
            return self.ttl
        if self.ttl is not None:
            raise RequestError("ttl: not together with expires_after", param="ttl")
        return self.expires_after.seconds
