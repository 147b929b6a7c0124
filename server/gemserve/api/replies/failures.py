"""How a request ended: its finish reason, or the error of one that failed."""

from __future__ import annotations

from fastapi.responses import JSONResponse

from gemserve.api.error_replies import Error, error_body
from gemserve.api.replies.reply_types import FinishReason
from gemserve.contract.events import Finished
from gemserve.errors import QueueFull

# a request counts as aborted until its terminal event comes
ABORTED = Finished(reason="abort", completion_tokens=0)
# the log says what it was
NOT_BUILT = Finished(reason="error", completion_tokens=0, error="its reply could not be built")


def is_failure(finished: Finished) -> bool:
    return finished.reason in ("error", "abort")


def finish_reason(finished: Finished) -> FinishReason:
    """The reason of a request that has not failed."""
    return "length" if finished.reason == "length" else "stop"


def failure_response(finished: Finished) -> JSONResponse:
    status = 503 if finished.is_late or finished.reason == "abort" else 500
    after_s = finished.retry_after_s
    headers = None if after_s is None else {"Retry-After": str(after_s)}
    return JSONResponse(failure_body(finished), status_code=status, headers=headers)


def failure_body(finished: Finished) -> Error:
    if finished.reason == "abort":
        return error_body("The request was cancelled.", kind="server_error", code="cancelled")
    if finished.is_late:
        return error_body(
            f"The requests before this one took too long: {finished.error}.",
            kind="overloaded_error",
            code=QueueFull.code,
        )
    return error_body(
        f"The request failed: {finished.error}", kind="server_error", code="engine_error"
    )
