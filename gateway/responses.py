"""aiohttp responses of the gateway's own making."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiohttp import web

if TYPE_CHECKING:
    from gateway.errors import GatewayError


def error_response(error: GatewayError, request_id: str) -> web.Response:
    """Return an error in OpenAI's shape."""
    headers = [*error.http_headers(), ("x-request-id", request_id)]
    return json_response(error.openai_body(), headers, status=error.status)


def json_response(
    body: bytes, headers: list[tuple[str, str]] | None = None, *, status: int = 200
) -> web.Response:
    """Return an encoded JSON document."""
    pairs = [("content-type", "application/json"), *(headers or ())]
    return web.Response(body=body, status=status, headers=pairs)
