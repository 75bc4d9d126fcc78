"""Errors in OpenAI's shape: which status and type each kind of error has, and the handlers that answer with them."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from sparsespec.core.errors import (
    ContextLengthError,
    EngineCrashError,
    InvalidValueError,
    OverloadedError,
    ServiceError,
    SparseSpecError,
    TimeLimitError,
    UnavailableError,
)
from sparsespec.server.encoding import json_bytes

log = logging.getLogger(__name__)

_STATUS: dict[type[Exception], int] = {
    OverloadedError: 429, UnavailableError: 503, EngineCrashError: 500, TimeLimitError: 504, InvalidValueError: 400}
_TYPES = {429: "rate_limit_error", 500: "server_error", 503: "service_unavailable_error", 504: "timeout_error"}
_CODES = {401: "invalid_api_key", 404: "not_found", 405: "method_not_allowed", 413: "body_too_large", 429: "queue_full",
          503: "unavailable", 504: "timeout"}


class ClientGoneError(Exception):
    """The client closed the connection; there is nobody to answer."""


class ModelNotFoundError(InvalidValueError):
    """A request for a model that this server does not serve."""


def status_of(error: Exception) -> int:
    """The HTTP status that an error is answered with."""
    if isinstance(error, ModelNotFoundError):
        return 404
    return next((status for kind, status in _STATUS.items() if isinstance(error, kind)), 500)


def error_body(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """{"error": {...}} as OpenAI writes it."""
    return {"error": {"message": message, "type": _TYPES.get(status, "invalid_request_error"), "param": param,
                      "code": code or _CODES.get(status)}}


def body_of(error: Exception) -> dict[str, Any]:
    """The error's body; what is not meant for users stays in the log."""
    status = status_of(error)
    if not isinstance(error, SparseSpecError):
        return error_body(status, "Internal error. The server's log says more.")
    code = None
    if isinstance(error, ModelNotFoundError):
        code = "model_not_found"
    elif isinstance(error, ContextLengthError):
        code = "context_length_exceeded"
    return error_body(status, str(error), getattr(error, "field", None), code)


def error_response(status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
    return Response(json_bytes(body), status, headers, "application/json")


def add_handlers(app: FastAPI) -> None:
    """Answer all errors of the app in OpenAI's shape."""

    def answer(request: Request, status: int, body: dict[str, Any], headers: dict[str, str] | None = None) -> Response:
        request.app.state.service.metrics.rejected(status)
        return error_response(status, body, headers)

    async def expected(request: Request, error: Exception) -> Response:
        retry = error.retry_after if isinstance(error, ServiceError) else None
        return answer(request, status_of(error), body_of(error), {"Retry-After": str(retry)} if retry is not None else None)

    async def malformed(request: Request, error: Exception) -> Response:
        message, param = _first_problem(error) if isinstance(error, RequestValidationError) else (str(error), None)
        return answer(request, 400, error_body(400, message, param))

    async def http(request: Request, error: Exception) -> Response:
        if not isinstance(error, HTTPException):
            return await unexpected(request, error)
        return answer(request, error.status_code, error_body(error.status_code, str(error.detail)),
                      dict(error.headers) if error.headers else None)

    async def gone(request: Request, error: Exception) -> Response:
        return Response(status_code=499)  # nobody reads it

    async def unexpected(request: Request, error: Exception) -> Response:
        log.error("%s %s failed", request.method, request.url.path, exc_info=error)
        return answer(request, 500, body_of(error))

    app.add_exception_handler(SparseSpecError, expected)
    app.add_exception_handler(RequestValidationError, malformed)
    app.add_exception_handler(HTTPException, http)
    app.add_exception_handler(ClientGoneError, gone)
    app.add_exception_handler(Exception, unexpected)


def _first_problem(error: RequestValidationError) -> tuple[str, str | None]:
    """(message with field, value and remedy, field) of a body that does not fit its model."""
    first = error.errors()[0]
    where = _path(first["loc"][1:], error.body)
    if first["type"] == "json_invalid":
        return f"body=...: not JSON ({first.get('ctx', {}).get('error', first['msg'])}). Send a JSON object", None
    if not where:
        return f"body={_shown(first['input'])}: not a JSON object. Send one, as Content-Type: application/json", None
    field = ".".join(where)
    if first["type"] == "extra_forbidden":
        return f"{field}={_shown(first['input'])}: not a field of this request. Leave it out, or check its spelling", field
    if first["type"] == "missing":
        return f"{field}=None: missing. Give {field}", field
    problem = str(first["msg"])
    return f"{field}={_shown(first['input'])}: {problem[:1].lower()}{problem[1:]}. Give {field} as documented", field


def _path(loc: Sequence[int | str], value: Any) -> list[str]:
    """Where in the body a problem is. pydantic also names the alternatives of a union that it tried: these are left out."""
    where = []
    for place, part in enumerate(loc):
        inside = isinstance(value, list) and isinstance(part, int)
        if inside or (isinstance(value, dict) and (part in value or place == len(loc) - 1)):
            where.append(str(part))
            value = value[part] if inside or part in value else None
    return where


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
