"""Every error of the data plane, and how a client sees it.

What a client gets, always as OpenAI's body and with ``x-request-id``::

    GatewayError                 500 api_error
    +-- InvalidRequest           400 invalid_request_error
    |   +-- Unauthorized         401 authentication_error
    |   +-- Forbidden            403 permission_error
    |   +-- NotFound             404 not_found_error
    |   |   +-- ModelNotFound    404 not_found_error, code model_not_found
    |   +-- MethodNotAllowed     405
    |   +-- BodyTimeout          408 timeout_error
    |   +-- BodyTooLarge         413
    |   +-- UnsupportedEncoding  415
    |   +-- ExpectationFailed    417
    |   +-- RateLimited          429 rate_limit_error, retry-after
    |   +-- HeadTooLarge         431
    +-- PoolUnavailable          503 overloaded_error, retry-after
    |   +-- PoolOverloaded       429 overloaded_error, retry-after
    |   +-- ShuttingDown         503 overloaded_error, retry-after
    +-- WorkerTimeout            504 timeout_error
    |   +-- DeadlineExceeded     504 timeout_error, x-should-retry: false
    +-- WorkerFailed             502 api_error

What ``gateway/upstream/client.py`` raises towards the proxy, never shown to a client as such::

    UpstreamError
    +-- ConnectFailed            nothing was sent
    +-- ResetBeforeFirstByte     the connection died before an answer's head was complete
    +-- FirstByteTimeout         no answer within the deadline; a long prefill, not a dead worker
    +-- ResetMidStream           the connection died inside an answer's body
    |   +-- TotalTimeout         the whole answer took longer than allowed
    +-- MalformedAnswer          what came is not HTTP, or more than the limits allow
"""

from __future__ import annotations

import math
from typing import ClassVar

import orjson


class GatewayError(Exception):
    """An error with an HTTP status and OpenAI's error body.

    Args:
        message: What was expected, what came, what to do; shown to the client.
        param: The request field at fault.
        code: A name that programs may compare.
        retry_after_s: Sent as ``retry-after`` and ``retry-after-ms``.
        should_retry: Sent as ``x-should-retry`` when not None; clients obey it before all else.
    """

    status: int = 500
    type: ClassVar[str] = "api_error"
    default_code: ClassVar[str | None] = None
    default_retry_after_s: ClassVar[float | None] = None
    default_should_retry: ClassVar[bool | None] = None

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
        should_retry: bool | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.default_code
        self.retry_after_s = retry_after_s or self.default_retry_after_s
        self.should_retry = self.default_should_retry if should_retry is None else should_retry

    def openai_body(self) -> bytes:
        """Return the JSON document ``{"error": {message, type, param, code}}``."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return orjson.dumps({"error": error})

    def event(self) -> bytes:
        """Return the same document as one server-sent event, for a stream that has begun."""
        return b"data: " + self.openai_body() + b"\n\n"

    def http_headers(self) -> list[tuple[str, str]]:
        """Return the headers that tell a client whether and when to try again."""
        headers = []
        if self.retry_after_s is not None:
            headers.append(("retry-after", str(max(1, math.ceil(self.retry_after_s)))))
            headers.append(("retry-after-ms", str(math.ceil(self.retry_after_s * 1000))))
        if self.should_retry is not None:
            headers.append(("x-should-retry", "true" if self.should_retry else "false"))
        return headers


class InvalidRequest(GatewayError):
    """The request cannot be served as it is; no worker was asked."""

    status = 400
    type = "invalid_request_error"


class Unauthorized(InvalidRequest):
    """No valid key or token came with the request."""

    status = 401
    type = "authentication_error"

    def http_headers(self) -> list[tuple[str, str]]:
        """Return the headers of every error, and how to authenticate (RFC 9110, 15.5.2)."""
        return [*super().http_headers(), ("www-authenticate", 'Bearer realm="warmlane"')]


class Forbidden(InvalidRequest):
    """Who sends this may not do it."""

    status = 403
    type = "permission_error"


class NotFound(InvalidRequest):
    """No such path."""

    status = 404
    type = "not_found_error"


class ModelNotFound(NotFound):
    """No pool serves a model of this name."""

    default_code = "model_not_found"


class MethodNotAllowed(InvalidRequest):
    """The path exists, with other methods."""

    status = 405


class BodyTimeout(InvalidRequest):
    """The client did not send its body in time."""

    status = 408
    type = "timeout_error"


class BodyTooLarge(InvalidRequest):
    """The body is longer than the configured limit."""

    status = 413


class UnsupportedEncoding(InvalidRequest):
    """The body is compressed in a way that cannot be undone here."""

    status = 415


class ExpectationFailed(InvalidRequest):
    """An ``Expect`` header other than ``100-continue``."""

    status = 417


class RateLimited(InvalidRequest):
    """Its tenant has used up what it may use per minute; ``retry-after`` says when to come back."""

    status = 429
    type = "rate_limit_error"


class HeadTooLarge(InvalidRequest):
    """The request's headers are longer than the configured limit."""

    status = 431


class WorkerFailed(GatewayError):
    """The worker could not be reached, broke off, or answered something that is not HTTP."""

    status = 502


class PoolUnavailable(GatewayError):
    """No worker of the model's pool takes requests right now."""

    status = 503
    type = "overloaded_error"
    # Probes readmit a worker within seconds.
    default_retry_after_s = 2.0


class PoolOverloaded(PoolUnavailable):
    """More requests wait for a worker of the pool than may, or one waited longer than it should."""

    # RFC 6585, 4: the client, or all of them together, asked for too much.
    status = 429


class ShuttingDown(PoolUnavailable):
    """This gateway takes no more requests; another replica will."""

    default_code = "shutting_down"
    # The client's next connection goes to another replica.
    default_retry_after_s = 1.0


class WorkerTimeout(GatewayError):
    """The worker did not begin to answer within the configured time."""

    status = 504
    type = "timeout_error"


class DeadlineExceeded(WorkerTimeout):
    """The request's time was over: its client's own, or that of any request."""

    default_code = "deadline_exceeded"
    # Who has no time left decides alone whether to begin anew.
    default_should_retry = False


_BY_STATUS: dict[int, type[GatewayError]] = {
    cls.status: cls
    for cls in (
        InvalidRequest,
        Unauthorized,
        Forbidden,
        NotFound,
        MethodNotAllowed,
        BodyTimeout,
        BodyTooLarge,
        UnsupportedEncoding,
        ExpectationFailed,
        HeadTooLarge,
        WorkerFailed,
        PoolUnavailable,
        WorkerTimeout,
    )
}


def error_for_status(status: int, message: str) -> GatewayError:
    """Return the error that stands for an HTTP status which somebody else decided on."""
    cls = _BY_STATUS.get(status) or (InvalidRequest if 400 <= status < 500 else GatewayError)
    error = cls(message)
    error.status = status
    return error


class UpstreamError(Exception):
    """A worker's connection failed; the message names the worker's address."""


class ConnectFailed(UpstreamError):
    """No connection within the connect timeout; nothing was sent."""


class ResetBeforeFirstByte(UpstreamError):
    """The connection ended before the head of an answer was complete."""


class FirstByteTimeout(UpstreamError):
    """No answer within the deadline; the connection was aborted."""


class ResetMidStream(UpstreamError):
    """The connection ended inside the body of an answer."""


class TotalTimeout(ResetMidStream):
    """The answer was still going on when the request's time was over."""


class MalformedAnswer(UpstreamError):
    """The worker's bytes are not HTTP/1.1, or exceed the limits on heads and bodies."""
