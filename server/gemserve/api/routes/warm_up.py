"""Follows the filter pass that warms the cache for a document, after its request is answered."""

from __future__ import annotations

import asyncio
import logging

from gemserve.api.documents.document_store import Document
from gemserve.api.replies.event_reader import Observer
from gemserve.api.telemetry.internal_errors import InternalErrors
from gemserve.contract.events import Filtered, Finished
from gemserve.engine.stream import Stream

log = logging.getLogger("gemserve.api")
_CANCELLED = "the warm-up was cancelled"


class WarmUps:
    """The warm-ups that are under way."""

    def __init__(self, errors: InternalErrors) -> None:
        self._errors = errors
        self._tasks: set[asyncio.Task[None]] = set()  # nothing else holds on to a task

    def follow(self, document: Document, stream: Stream, observer: Observer) -> None:
        """Keep the document's status up to date. `document.cancel` ends the pass."""
        document.cancel = stream.cancel
        task = asyncio.create_task(_follow(document, stream, observer))
        self._tasks.add(task)
        task.add_done_callback(self._forget)

    def _forget(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._errors.count("document_warm_up")
            log.error("a document's warm-up cannot be followed", exc_info=error)


async def _follow(document: Document, stream: Stream, observer: Observer) -> None:
    has_chosen = False
    finished = Finished(reason="abort", completion_tokens=0)
    try:
        async for event in stream:
            observer.see(event)
            if isinstance(event, Filtered):
                has_chosen = True
            elif isinstance(event, Finished):
                finished = event
    finally:
        stream.cancel()
        observer.close()
        if finished.reason == "error" or not has_chosen:
            document.settle("failed", finished.error or _CANCELLED)
        else:
            document.settle("ready")
