"""The server's log on standard error, as text or as one JSON object a line.

No line has text of a prompt or of an answer. Every line about a request has its id.
"""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any, Literal

LogFormat = Literal["text", "json"]
# the attributes of every record; what else a record has was given as `extra`
_USUAL = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "color_message"}


class ToStderr(logging.Handler):
    """Writes to `sys.stderr` as it is at that time, because tests replace it."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            print(self.format(record), file=sys.stderr, flush=True)
        except Exception:
            self.handleError(record)


class _TextFormatter(logging.Formatter):
    """`INFO:     message`, as uvicorn writes it."""

    def format(self, record: logging.LogRecord) -> str:
        return f"{record.levelname + ':':<9} {super().format(record)}"


class JsonFormatter(logging.Formatter):
    """One object with the time in UTC, the level, the logger, the message and what was added."""

    def format(self, record: logging.LogRecord) -> str:
        from gemserve.api.access.request_id import current_request_id

        at = datetime.fromtimestamp(record.created, UTC)
        line: dict[str, Any] = {
            "time": at.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request_id = current_request_id.get()
        if request_id is not None:
            line["request_id"] = request_id
        line |= {name: value for name, value in vars(record).items() if _is_added(name)}
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def _is_added(name: str) -> bool:
    # ray adds private attributes to every record once it is imported
    return name not in _USUAL and not name.startswith("_")


def set_up_logs(log_format: LogFormat) -> dict[str, Any] | None:
    """Write the logs of gemserve, and as JSON all logs. Returns uvicorn's `log_config`."""
    handler = ToStderr()
    handler.setFormatter(JsonFormatter() if log_format == "json" else _TextFormatter())
    ours = logging.getLogger("gemserve")
    ours.setLevel(logging.INFO)
    if log_format == "text":
        from uvicorn.config import LOGGING_CONFIG

        ours.handlers[:] = [handler]
        return LOGGING_CONFIG
    ours.handlers.clear()  # the handler of all loggers gets its lines, too
    logging.getLogger("gemserve.loading").handlers.clear()
    logging.getLogger("gemserve.loading").propagate = True
    for name in ("uvicorn", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.INFO)
    logging.getLogger().handlers[:] = [handler]
    return None
