"""Errors as OpenAI clients expect them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Any

from fastapi.responses import JSONResponse
from pydantic import ValidationError

from gemserve.api.requests.base_bodies import UNSUPPORTED
from gemserve.errors import (
    AdapterBusy,
    AdapterNotFound,
    AdapterUnavailable,
    EngineDead,
    GemserveError,
    InvalidKey,
    ModelNotFound,
    PermissionDenied,
    QueueFull,
    QuotaExceeded,
    RequestError,
    shown,
)

_SHOWN = 200


def error_body(
    message: str, *, kind: str, param: str | None = None, code: str | None = None
) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: GemserveError) -> JSONResponse:
    """The reply to an error raised before anything was sent."""
    if isinstance(error, RequestError):
        status = 404 if isinstance(error, (ModelNotFound, AdapterNotFound)) else 400
        body = error_body(
            str(error), kind="invalid_request_error", param=error.param, code=error.code
        )
        return JSONResponse(body, status_code=status)
    if isinstance(error, InvalidKey):
        body = error_body(str(error), kind="invalid_request_error", code=error.code)
        return JSONResponse(body, status_code=401, headers={"WWW-Authenticate": "Bearer"})
    if isinstance(error, PermissionDenied):
        body = error_body(str(error), kind="invalid_request_error", code=error.code)
        return JSONResponse(body, status_code=403)
    if isinstance(error, QuotaExceeded):
        body = error_body(str(error), kind="requests", code=error.code)
        headers = {"Retry-After": str(error.retry_after_s)}
        return JSONResponse(body, status_code=429, headers=headers)
    if isinstance(error, (QueueFull, AdapterBusy)):
        body = error_body(str(error), kind="overloaded_error", code=error.code)
        return JSONResponse(body, status_code=503, headers={"Retry-After": "1"})
    if isinstance(error, AdapterUnavailable):  # waiting does not help, so no Retry-After
        body = error_body(str(error), kind="server_error", param=error.param, code=error.code)
        return JSONResponse(body, status_code=503)
    if isinstance(error, EngineDead):
        return JSONResponse(
            error_body(str(error), kind="server_error", code="engine_dead"), status_code=503
        )
    return JSONResponse(error_body(str(error), kind="server_error"), status_code=500)


def from_validation(error: ValidationError, body: object) -> RequestError:
    """The first complaint of pydantic's about `body`, naming field, value and limit."""
    first = error.errors(include_url=False)[0]
    path = _path(first["loc"], body, is_missing=first["type"] == "missing")
    if first["type"] == "extra_forbidden":
        return unknown_field(path or "")
    if first["type"] == "missing":
        return RequestError(f"{path}: required", param=path, code="missing_field")
    if path is not None and path.split(".")[0] in UNSUPPORTED:
        return RequestError(f"{path}={shown(first['input'])}: not supported", param=path)
    message = first["msg"].removeprefix("Value error, ")
    message = message.removesuffix(" or instance of FilterBody")
    return RequestError(f"{path}={shown(first['input'])}: {message}", param=path)


def unknown_field(name: str) -> RequestError:
    return RequestError(
        f"{name[:_SHOWN]}: unknown field", param=name[:_SHOWN], code="unknown_field"
    )


def _path(location: tuple[int | str, ...], body: object, *, is_missing: bool) -> str | None:
    """The field's path; pydantic's location also names the members of unions that were tried."""
    parts: list[str] = []
    for place, part in enumerate(location):
        if (isinstance(body, dict) and part in body) or (
            isinstance(body, list) and isinstance(part, int) and part < len(body)
        ):
            body = body[part]  # type: ignore[index]
            parts.append(str(part))
        elif is_missing and place == len(location) - 1:
            parts.append(str(part))
    return ".".join(parts)[:_SHOWN] or None
