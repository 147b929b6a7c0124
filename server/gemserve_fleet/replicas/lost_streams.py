"""The last words of a stream whose replica was lost, in the form of the stream's protocol."""

from __future__ import annotations

from gemserve.api.error_replies import error_body
from gemserve.api.replies.server_sent_events import DONE, EVENTS, data_event
from gemserve.wings import wings

STREAM_TYPES = (EVENTS.encode(), b"application/x-ndjson")


def last_words(path: str, message: str, code: str, request_id: str, last_body: bytes) -> bytes:
    """One error, and `[DONE]` where the protocol has it. `last_body`: what was sent before."""
    for wing in wings():
        said = wing.last_words(
            path, message=message, code=code, request_id=request_id, last_body=last_body
        )
        if said is not None:
            return said
    return (data_event(error_body(message, kind="overloaded_error", code=code)) + DONE).encode()
