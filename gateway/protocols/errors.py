"""Errors in the shape of the API that a client speaks.

Source: Anthropic's API reference, "Errors" (types by status), and its streams' ``error`` event;
OpenAI's API reference for the other shapes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

from gateway.errors import InvalidRequest
from gateway.protocols.surfaces import family_of

if TYPE_CHECKING:
    from gateway.errors import GatewayError

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class NotSupported(InvalidRequest):
    """Nobody here, engines included, can do what is asked; trying again will not help."""

    status = 501
    default_code = "not_supported"

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, should_retry=False)


def anthropic_type(status: int) -> str:
    """Return the type that Anthropic's API has for a status."""
    known = _ANTHROPIC_TYPES.get(status)
    if known is not None:
        return known
    return "invalid_request_error" if 400 <= status < 500 else "api_error"


def anthropic_body(status: int, message: str) -> bytes:
    """Return Anthropic's error document."""
    error = {"type": anthropic_type(status), "message": message}
    return orjson.dumps({"type": "error", "error": error})


def error_body(error: GatewayError, path: str) -> bytes:
    """Return the document that tells of an error under ``path``."""
    if family_of(path) == "anthropic":
        return anthropic_body(error.status, error.message)
    return error.openai_body()


def error_event(error: GatewayError, path: str) -> bytes:
    """Return the event that tells of an error in a stream that has begun."""
    if family_of(path) == "anthropic":
        return b"event: error\ndata: " + error_body(error, path) + b"\n\n"
    if path == "/v1/responses":
        # Clients look for an ``error`` event of this API, or for an error object as in the others.
        document: dict[str, Any] = orjson.loads(error.openai_body())
        told = {"type": "error", "code": error.code, "message": error.message, "param": error.param}
        return b"event: error\ndata: " + orjson.dumps(told | document) + b"\n\n"
    return error.event()


def message_of(body: bytes) -> str:
    """Return what an engine's error body says, whatever its shape."""
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        return body[:1000].decode("utf-8", "replace").strip() or "The engine gave no reason."
    for _ in range(2):
        if not isinstance(document, dict):
            break
        inner = document.get("error", document.get("message", document.get("detail")))
        if inner is None:
            break
        document = inner
    return document if isinstance(document, str) else orjson.dumps(document).decode()
