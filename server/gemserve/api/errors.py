"""Errors as OpenAI clients expect them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError

from gemserve.errors import (
    EngineDead,
    GemserveError,
    ModelNotFound,
    QueueFull,
    RequestError,
)

_SHOWN = 200


def error_body(
    message: str, *, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: GemserveError) -> JSONResponse:
    """The reply to an error raised before anything was sent."""
    if isinstance(error, RequestError):
        status = 404 if isinstance(error, ModelNotFound) else 400
        body = error_body(
            str(error), kind="invalid_request_error", param=error.param, code=error.code
        )
        return JSONResponse(body, status_code=status)
    if isinstance(error, QueueFull):
        body = error_body(str(error), kind="overloaded_error", code="queue_full")
        return JSONResponse(body, status_code=503, headers={"Retry-After": "1"})
    if isinstance(error, EngineDead):
        return JSONResponse(
            error_body(str(error), kind="server_error", code="engine_dead"), status_code=503
        )
    return JSONResponse(error_body(str(error), kind="server_error"), status_code=500)


def from_validation(error: ValidationError) -> RequestError:
    """The first complaint of pydantic's, naming field, value and limit; one is enough."""
    first = error.errors(include_url=False)[0]
    path = ".".join(str(p) for p in first["loc"] if _is_field(p)) or None
    if first["type"] == "extra_forbidden":
        name = (path or "")[:_SHOWN]
        return RequestError(f"{name}: unknown field", param=name, code="unknown_field")
    if first["type"] == "missing":
        return RequestError(f"{path}: required", param=path, code="missing_field")
    message = first["msg"].removeprefix("Value error, ")
    shown = repr(first["input"])
    if len(shown) > _SHOWN:
        shown = shown[:_SHOWN] + "…"
    return RequestError(f"{path}={shown}: {message}", param=path)


def _is_field(part: int | str) -> bool:
    """Pydantic's paths also name the member of a union that was tried."""
    if isinstance(part, int):
        return True
    markers = ("[", "literal", "constrained", "function-")
    return part not in ("str", "int", "float", "bool") and not any(m in part for m in markers)
