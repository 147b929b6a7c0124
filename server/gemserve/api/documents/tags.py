"""Tells the engine which stored documents a request contains, and which are gone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

from gemserve.engine.worker import Engine
from gemserve.types import Request


def tagged(request: Request, ids: tuple[str, ...], *, is_pinned: bool = False) -> Request:
    """The request, so that the document cache knows whose tokens it keeps."""
    known = {field.name for field in fields(Request)}
    tags: dict[str, Any] = {"documents": ids, "pin": is_pinned}
    return replace(request, **{name: tag for name, tag in tags.items() if name in known})


def forgetting(engine: Engine) -> Callable[[Sequence[str]], None]:
    """What has the engine drop all that it keeps of documents."""
    forget = getattr(engine, "forget_documents", None)
    return forget if forget is not None else lambda ids: None
