"""Typed client of gemserve: the official `openai` SDK, with filters and their reports."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gemserve_client.client import AsyncGemserveClient as AsyncGemserveClient
    from gemserve_client.client import GemserveClient as GemserveClient
    from gemserve_client.documents import file_part as file_part
    from gemserve_client.filters import Filter as Filter
    from gemserve_client.replies import Adapter as Adapter
    from gemserve_client.replies import ChatCompletion as ChatCompletion
    from gemserve_client.replies import ChatCompletionChunk as ChatCompletionChunk
    from gemserve_client.replies import Completion as Completion
    from gemserve_client.replies import Document as Document
    from gemserve_client.replies import FilterReport as FilterReport
    from gemserve_client.replies import Progress as Progress
    from gemserve_client.replies import Reranked as Reranked
    from gemserve_client.replies import Scored as Scored
    from gemserve_client.replies import Selection as Selection

__all__ = [
    "Adapter",
    "AsyncGemserveClient",
    "ChatCompletion",
    "ChatCompletionChunk",
    "Completion",
    "Document",
    "Filter",
    "FilterReport",
    "GemserveClient",
    "Progress",
    "Reranked",
    "Scored",
    "Selection",
    "file_part",
]


def __getattr__(name: str) -> object:
    """Import a name on first use, because the command line must start without the SDK."""
    if name in __all__:
        for home in ("filters", "replies", "documents", "client"):
            found = vars(import_module(f"{__name__}.{home}")).get(name)
            if found is not None:
                return found
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
