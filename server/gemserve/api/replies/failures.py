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


class EndedEarly(Exception):
    """A request that another one waits for was late or cancelled, and both end so."""

    def __init__(self, finished: Finished) -> None:
        super().__init__(finished.error)
        self.finished = finished


def is_failure(finished: Finished) -> bool:
    return finished.reason in ("error", "abort")


def finish_reason(finished: Finished) -> FinishReason:
    """The reason of a request that has not failed."""
    return "length" if finished.reason == "length" else "stop"


def failure_response(finished: Finished) -> JSONResponse:
    status, headers = 500, {}
    if finished.late == "not_done":  # its client would ask, and wait, as long again
        status, headers = 504, {"x-should-retry": "false"}
    elif finished.late == "not_begun" or finished.reason == "abort":
        status = 503
    if finished.retry_after_s is not None:
        headers = {"Retry-After": str(finished.retry_after_s)}
    return JSONResponse(failure_body(finished), status_code=status, headers=headers)


def failure_body(finished: Finished) -> Error:
    if finished.reason == "abort":
        return error_body("The request was cancelled.", kind="server_error", code="cancelled")
    if finished.late == "not_begun":
        return error_body(
            f"The requests before this one took too long: {finished.error}.",
            kind="overloaded_error",
            code=QueueFull.code,
        )
    code = "request_timeout" if finished.late == "not_done" else "engine_error"
    return error_body(f"The request failed: {finished.error}", kind="server_error", code=code)
