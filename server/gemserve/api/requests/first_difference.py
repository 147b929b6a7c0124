"""Which part of a prompt differs first from what its key has sent before: why it is not cached."""

from __future__ import annotations

import hashlib
import secrets
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from pydantic_core import to_json

from gemserve.contract.adapters import LoadedAdapter
from gemserve.contract.filter_options import FilterParams
from gemserve.contract.prompt_parts import PartDigests

_KEY = secrets.token_bytes(32)  # of this process: nobody can tell a text from a digest
_MOST_BEGINNINGS = 40_000  # of all keys' chats, that are remembered: about 10 MB
_FIRST = ("system", "developer")


def digests_of(
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]],
    params: FilterParams,
    adapter: LoadedAdapter | None,
    variables: Mapping[str, Any] | None,
    cache_salt: str | None = None,
) -> PartDigests:
    """What tells the beginnings of a chat from those of others, and their texts from nobody."""
    num_first = next((i for i, m in enumerate(messages) if m["role"] not in _FIRST), len(messages))
    before_tools = (
        ("cache_salt", cache_salt or None),
        ("adapter", None if adapter is None else (adapter.name, adapter.version)),
        ("filter.method", params.method),
        ("filter.layer", params.layer),
        ("filter.window", params.window),
        ("filter.reader", params.reader),
        ("chat_template_kwargs", variables or None),
        ("system", messages[:num_first]),
    )
    after_tools = ((f"message {i}", messages[i]) for i in range(num_first, len(messages)))
    parts = list(_chained(before_tools, b""))
    _, before = parts[-1]
    each = [_digest(tool).hex() for tool in tools]
    parts += _chained((("tools", each), *after_tools), before)
    return PartDigests(tuple(parts), _digest(["in any order", *sorted(each)], before))


def _chained(parts: Iterable[tuple[str, object]], before: bytes) -> Iterator[tuple[str, bytes]]:
    for name, value in parts:
        before = _digest(value, before)
        yield name, before


def _digest(value: object, before: bytes = b"") -> bytes:
    text = to_json(value, fallback=repr)
    return hashlib.blake2b(before + text, key=_KEY, digest_size=16).digest()


class EarlierPrompts:
    """Remembers how the last chats of each key begin. It is used on the event loop only."""

    def __init__(self) -> None:
        # what a beginning is of, and its digest; does a chat end there? The last used are last.
        self._ends: OrderedDict[tuple[bytes, bytes], bool] = OrderedDict()

    def difference(self, tenant: bytes, chat: PartDigests) -> str | None:
        """The part behind the longest beginning that the chat shares with earlier ones of its key.

        None: there is no earlier one, or all of one is the chat's beginning, or the chat the
        beginning of one. The chat is remembered.
        """
        name = self._first_unknown(tenant, chat)
        for number, (_, digest) in enumerate(chat.parts, start=1):
            is_end = number == len(chat.parts) or self._ends.get((tenant, digest), False)
            self._remember((tenant, digest), is_end=is_end)
        self._remember((tenant, chat.tools_in_any_order), is_end=False)
        self._remember((tenant, b""), is_end=False)
        while len(self._ends) > _MOST_BEGINNINGS:
            self._ends.popitem(last=False)
        return name

    def _first_unknown(self, tenant: bytes, chat: PartDigests) -> str | None:
        if (tenant, b"") not in self._ends:
            return None
        is_end = False
        for name, digest in chat.parts:
            if (tenant, digest) not in self._ends:
                if is_end:
                    return None
                is_reordered = (tenant, chat.tools_in_any_order) in self._ends
                return "tools_order" if name == "tools" and is_reordered else name
            is_end = self._ends[tenant, digest]
        return None

    def _remember(self, beginning: tuple[bytes, bytes], *, is_end: bool) -> None:
        self._ends[beginning] = is_end
        self._ends.move_to_end(beginning)
