"""Errors as OpenAI clients expect them: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi.responses import JSONResponse
from pydantic import Field
from typing_extensions import TypedDict  # typing's tells pydantic too little before Python 3.12

from gemserve.errors import (
    AdapterBusy,
    AdapterNotFound,
    AdapterUnavailable,
    DocumentNotFound,
    EngineDead,
    GemserveError,
    InvalidKey,
    LibraryBusy,
    LibraryError,
    LibraryFileNotFound,
    LibraryNotFound,
    ModelNotFound,
    NoLibraries,
    NotCalibrated,
    OtherModel,
    PdfsBusy,
    PermissionDenied,
    QueueFull,
    QuotaExceeded,
    ReplicaUnavailable,
    RequestError,
    SchemasBusy,
)

ErrorKind = Literal["invalid_request_error", "requests", "overloaded_error", "server_error"]


_MISSING = (
    ModelNotFound,
    AdapterNotFound,
    DocumentNotFound,
    NoLibraries,
    LibraryNotFound,
    LibraryFileNotFound,
)


class ErrorDetail(TypedDict):
    message: str
    type: ErrorKind
    param: Annotated[str | None, Field(description="The field at fault, with its path.")]
    code: str | None


class Error(TypedDict):
    error: ErrorDetail


def error_body(
    message: str, *, kind: ErrorKind, param: str | None = None, code: str | None = None
) -> Error:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def error_response(error: GemserveError) -> JSONResponse:
    """The reply to an error raised before anything was sent."""
    if isinstance(error, RequestError):
        is_missing = isinstance(error, _MISSING)
        status = 404 if is_missing else 400
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
    if isinstance(
        error, (QueueFull, AdapterBusy, SchemasBusy, PdfsBusy, NotCalibrated, ReplicaUnavailable)
    ):
        body = error_body(str(error), kind="overloaded_error", code=error.code)
        headers = {"Retry-After": str(error.retry_after_s)}
        return JSONResponse(body, status_code=503, headers=headers)
    if isinstance(error, AdapterUnavailable):  # waiting does not help, so no Retry-After
        body = error_body(str(error), kind="server_error", param=error.param, code=error.code)
        return JSONResponse(body, status_code=503)
    if isinstance(error, LibraryError):
        is_conflict = isinstance(error, (LibraryBusy, OtherModel))
        kind: ErrorKind = "invalid_request_error" if is_conflict else "server_error"
        body = error_body(str(error), kind=kind, code=error.code)
        headers = {"Retry-After": str(error.retry_after_s)} if error.retry_after_s else {}
        return JSONResponse(body, status_code=409 if is_conflict else 500, headers=headers)
    if isinstance(error, EngineDead):
        return JSONResponse(
            error_body(str(error), kind="server_error", code="engine_dead"), status_code=503
        )
    return JSONResponse(error_body(str(error), kind="server_error"), status_code=500)
