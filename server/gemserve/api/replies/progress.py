"""What a stream says about its prompts while they wait and are read."""

from __future__ import annotations

import time

from gemserve.api.replies.event_reader import EventReader
from gemserve.api.replies.reply_types import ChunkExtras, ProgressObject, PromptProgress
from gemserve.engine.sequence.progress import Progress

# Seconds from one look at the engine to the next: no stream gets more of these chunks than that.
PERIOD_S = 0.25
# Seconds after which progress that has not changed is sent again.
_REPEAT_S = 1.0


class ProgressReader:
    """Reads how far the choice has come that will have the first token."""

    def __init__(self, reader: EventReader, *, is_for_llama: bool) -> None:
        """`is_for_llama`: add llama.cpp's form."""
        reader.pause_by(self._find_pause_s)
        self._streams = reader.streams
        self._keep_alive_s = reader.keep_alive_s
        self._is_for_llama = is_for_llama
        self._began_s = time.monotonic()
        self._last: Progress | None = None
        self._sent_s = 0.0
        self.is_over = False
        for stream in self._streams:
            stream.is_watched = True

    def _find_pause_s(self) -> float:
        """How long to wait for an event until the next look. The first look is at once."""
        if self.is_over:
            return self._keep_alive_s
        return 0.0 if self._last is None else PERIOD_S

    def next(self) -> ChunkExtras | None:
        """What to send now. None: nothing has changed lately, or a choice has its first token."""
        known = [stream.progress for stream in self._streams]
        if self.is_over or None in known:
            self.stop()
            return None
        progress = max((p for p in known if p is not None), key=lambda p: p.rank)
        now_s = time.monotonic()
        if progress == self._last and now_s - self._sent_s < _REPEAT_S:
            return None
        self._last, self._sent_s = progress, now_s
        extras: ChunkExtras = {"progress": _progress_object(progress)}
        if self._is_for_llama:
            extras["prompt_progress"] = self._prompt_progress(progress, now_s)
        return extras

    def stop(self) -> None:
        """Send nothing any more. Idempotent."""
        self.is_over = True
        for stream in self._streams:
            stream.is_watched = False

    def _prompt_progress(self, progress: Progress, now_s: float) -> PromptProgress:
        return {
            "total": progress.total,
            "cache": progress.cached,
            "processed": progress.tokens,
            "time_ms": round((now_s - self._began_s) * 1e3),
        }


def said_in_pause(progress: ProgressReader | None) -> ChunkExtras | None:
    """What the event of a pause says, which may be nothing. None: there is no event."""
    return {} if progress is None or progress.is_over else progress.next()


def _progress_object(progress: Progress) -> ProgressObject:
    return {
        "phase": progress.phase,
        "tokens": progress.tokens,
        "total": progress.total,
        "eta_ms": None if progress.eta_s is None else round(progress.eta_s * 1e3),
    }
