"""What every answer has in common: a request id, JSON bodies, errors in OpenAI's shape."""

from __future__ import annotations

import re
import uuid
from typing import TYPE_CHECKING, Any
from weakref import ref

import orjson
import structlog
from aiohttp import web

from runner.errors import ApiError
from runner.service import Service

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

# Weak: aiohttp keeps every application that has answered a request in a cache of its module, and
# a stopped runner's model and pool would stay with it. The server holds the service.
SERVICE = web.AppKey("service", ref[Service])
REQUEST_ID = web.RequestKey("request_id", str)

# A client's id is echoed and logged, so only visible ASCII of a sane length is taken over.
_ACCEPTED_ID = re.compile(r"[\x21-\x7e]{1,128}")

log = structlog.get_logger(__name__)


def service_of(request: web.Request) -> Service:
    """Return what answers a request."""
    service = request.app[SERVICE]()
    assert service is not None, "its server is gone, and no request outlives that"
    return service


def json_response(
    body: Any, status: int = 200, headers: dict[str, str] | None = None
) -> web.Response:
    """Return a JSON answer."""
    return web.Response(
        body=orjson.dumps(body), status=status, headers=headers, content_type="application/json"
    )


def error_response(error: ApiError) -> web.Response:
    """Return the answer for a refusal."""
    headers = {}
    if error.retry_after_s is not None:
        headers["retry-after"] = str(error.retry_after_s)
    if error.should_retry is not None:
        headers["x-should-retry"] = str(error.should_retry).lower()
    return json_response(error.body(), error.status, headers)


@web.middleware
async def answer_errors(
    request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
) -> web.StreamResponse:
    """Give the request its id and turn whatever is raised into a JSON error."""
    given = request.headers.get("x-request-id", "")
    request[REQUEST_ID] = given if _ACCEPTED_ID.fullmatch(given) else uuid.uuid4().hex
    try:
        return await handler(request)
    except ApiError as error:
        return error_response(error)
    except web.HTTPException as error:
        return _routing_error(request, error)
    except ConnectionError:
        # The client is gone in the middle of its body: nobody reads an answer.
        raise
    except Exception:
        log.exception("request_failed", request_id=request[REQUEST_ID], path=request.path)
        return error_response(ApiError(500, "internal error", code="internal_error"))


async def add_request_id(request: web.Request, response: web.StreamResponse) -> None:
    """Put the id on the answer; runs for streams too, just before their headers leave."""
    response.headers["x-request-id"] = request.get(REQUEST_ID) or uuid.uuid4().hex


def _routing_error(request: web.Request, error: web.HTTPException) -> web.Response:
    messages = {
        404: f"no such path: {request.path}",
        405: f"{request.method} is not allowed for {request.path}",
        413: f"the body is larger than {request.client_max_size} bytes",
    }
    codes = {404: "not_found", 405: "method_not_allowed", 413: "body_too_large"}
    refusal = ApiError(
        error.status, messages.get(error.status, error.reason), code=codes.get(error.status)
    )
    response = error_response(refusal)
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response
