"""What an ingress and a replica say to each other. All of it can be pickled.

A replica answers a `RelayedRequest` with batches of messages: the ASGI messages of its application
as they are, and between them what only the ingress needs to know.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from gemserve.api.access.keys import Caller
from gemserve.contract.adapters import AdapterInfo

AsgiMessage = Mapping[str, Any]


@dataclass(slots=True)
class RequestBody:
    """A request's body. `drop` frees its bytes, although the request is held until its reply ends.

    A process that has a copy of the request has a copy of the body.
    """

    content: bytes = field(default=b"", repr=False)

    def drop(self) -> bytes:
        """Returns what is dropped."""
        content, self.content = self.content, b""
        return content


@dataclass(frozen=True, slots=True, kw_only=True)
class RelayedRequest:
    """A request whose body is whole. `number` is the ingress's, and of no other request.

    `scope`: the part of its ASGI scope that can be pickled. `documents`: ids that the replica must
    know before the application sees the request. `gone`: ids that it must not know any more.
    `waited_s`: for how long it has waited in the ingress, with replicas that were lost.
    """

    number: str
    scope: Mapping[str, Any]
    body: RequestBody
    caller: Caller | None
    documents: tuple[str, ...] = ()
    gone: tuple[str, ...] = ()
    waited_s: float = 0.0

    @property
    def tenant(self) -> bytes:
        return b"" if self.caller is None else self.caller.key


@dataclass(frozen=True, slots=True, kw_only=True)
class DocumentCopy:
    """A stored document, for replicas that do not have it. `home`: the replica that has read it.

    `left_s`: seconds until it expires, when the message was written. Clocks of hosts may differ, or
    be set to another time.
    """

    id: str
    text: str = field(repr=False)
    num_bytes: int
    num_tokens: int
    name: str | None
    created_s: int
    expires_s: int
    left_s: float
    is_pinned: bool
    home: str


@dataclass(frozen=True, slots=True)
class AdapterSet:
    """The adapters that all replicas have. `revision`: larger than those of earlier sets."""

    revision: int
    adapters: tuple[AdapterInfo, ...]


@dataclass(frozen=True, slots=True)
class Accepted:
    """The first message: which replica has the request."""

    replica: str


@dataclass(frozen=True, slots=True)
class ChoicesAdded:
    """The request has so many choices more than one."""

    count: int


@dataclass(frozen=True, slots=True)
class TokensUsed:
    """The request's key has used so many tokens more: see `Quota.charge`."""

    count: int
    age_s: float = 0.0


@dataclass(frozen=True, slots=True)
class DocumentsStored:
    """The request has stored these."""

    copies: tuple[DocumentCopy, ...]


@dataclass(frozen=True, slots=True)
class DocumentsMissing:
    """The replica waits for these, which it does not have."""

    ids: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class WholeReply:
    """A reply that is no stream."""

    replica: str
    status: int
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes


FromReplica = (
    AsgiMessage | Accepted | ChoicesAdded | TokensUsed | DocumentsStored | DocumentsMissing
)
