"""The errors of the operators' own port have the shape of all others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
from aiohttp import web

from gateway.errors import error_for_status
from gateway.proxy.headers import request_id_from
from gateway.proxy.responses import error_response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

log = structlog.get_logger("warmlane")


@web.middleware
async def in_shape(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Answer in our words what aiohttp would answer in its own, and what no handler caught."""
    try:
        return await handler(request)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        status, allowed = error.status, error.headers.get("allow")
    except ConnectionError:
        raise  # nobody is there to be answered
    except Exception as error:
        log.error("request_failed", exc_info=error)
        status, allowed = 500, None
    what = f"{request.method} {request.path}"
    elsewhere = "; clients' paths are on server.port" if request.path.startswith("/v1/") else ""
    said = {
        404: f"No such path: {what}{elsewhere}.",
        405: f"Method not allowed: {what}.",
        413: "The body is larger than server.max_body_mb.",
    }
    message = said.get(status, "The gateway failed to answer." if status >= 500 else "Refused.")
    request_id = request_id_from(request.headers.get("x-request-id"))
    response = error_response(error_for_status(status, message), request_id)
    if allowed:
        response.headers["allow"] = allowed
    return response
