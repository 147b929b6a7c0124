"""Which part of a prompt differs first from what its key has sent before: why it is not cached."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import to_json

from gemserve.contract.adapters import LoadedAdapter
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.prompt_parts import PartDigests

_KEY = secrets.token_bytes(32)  # of this process: nobody can tell a text from a digest
_MOST_PROMPTS = 16  # that are remembered of each tenant
_MOST_TENANTS = 1000
_FIRST = ("system", "developer")


def digests_of(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    params: FilterParams,
    adapter: LoadedAdapter | None,
    variables: Mapping[str, Any] | None,
) -> PartDigests:
    """What tells the parts of a chat from those of others, and the texts in them from nobody."""
    settings = {
        "adapter": None if adapter is None else (adapter.name, adapter.version),
        "filter.method": params.method,
        "filter.layer": params.layer,
        "filter.window": params.window,
        "filter.reader": params.reader,
        "chat_template_kwargs": variables or None,
    }
    return PartDigests(
        settings=tuple((name, _digest(value)) for name, value in settings.items()),
        tools=tuple(map(_digest, tools)),
        messages=tuple((str(message["role"]), _digest(message)) for message in messages),
    )


def _digest(value: object) -> bytes:
    return hashlib.blake2b(to_json(value, fallback=repr), key=_KEY, digest_size=16).digest()


class EarlierPrompts:
    """Remembers the parts of the last chats of each tenant. It is used on the event loop only."""

    def __init__(self) -> None:
        self._of: OrderedDict[bytes, deque[PartDigests]] = OrderedDict()

    def difference(self, tenant: bytes, parts: PartDigests) -> str | None:
        """The part in which a chat differs first from the most similar earlier one of its tenant.

        None: there is none, or the chat begins with all of it. The chat is remembered.
        """
        earlier = self._of.setdefault(tenant, deque(maxlen=_MOST_PROMPTS))
        self._of.move_to_end(tenant)
        if len(self._of) > _MOST_TENANTS:
            self._of.popitem(last=False)
        own = list(_in_order(parts))
        # of those with as many parts in common the newest counts
        found = [_compared(own, list(_in_order(other))) for other in reversed(earlier)]
        earlier.append(parts)
        if not found:
            return None
        _, name = max(found, key=lambda each: each[0])
        return name


def _in_order(parts: PartDigests) -> Iterator[tuple[str, object]]:
    """Names of parts and what tells them apart, as they follow one another in most prompts."""
    yield from parts.settings
    numbered = list(enumerate(parts.messages))
    num_first = next((i for i, (role, _) in numbered if role not in _FIRST), len(numbered))
    yield "system", [digest for _, digest in parts.messages[:num_first]]
    yield "tools", parts.tools
    for index, (_, digest) in numbered[num_first:]:
        yield f"message {index}", digest


def _compared(
    own: Sequence[tuple[str, object]], other: Sequence[tuple[str, object]]
) -> tuple[int, str | None]:
    """How many parts two prompts begin with alike, and the name of the next part of the first.

    No name: one of them ends there.
    """
    for number, ((name, left), (_, right)) in enumerate(zip(own, other, strict=False)):
        if left == right:
            continue
        if name == "tools" and isinstance(left, tuple) and isinstance(right, tuple):
            name = "tools_order" if sorted(left) == sorted(right) else name
        return number, name
    return min(len(own), len(other)), None
