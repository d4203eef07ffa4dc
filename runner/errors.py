"""Errors a client sees, always as OpenAI's body ``{"error": {message, type, param, code}}``."""

from __future__ import annotations

from typing import Any

# OpenAI's `type` for a status; others of the 4xx class are invalid requests, 5xx server errors.
_TYPES = {
    404: "not_found_error",
    413: "invalid_request_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class ApiError(Exception):
    """A refusal with its HTTP status.

    Attributes:
        status: HTTP status.
        message: What was expected, what came.
        param: The body field at fault.
        code: A word programs can test.
        retry_after_s: When to come back, for 503.
        should_retry: What OpenAI's clients are told about trying again; None leaves it to them.
    """

    should_retry: bool | None = None

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s

    def body(self) -> dict[str, Any]:
        """Return the JSON body."""
        fallback = "server_error" if self.status >= 500 else "invalid_request_error"
        return {
            "error": {
                "message": self.message,
                "type": _TYPES.get(self.status, fallback),
                "param": self.param,
                "code": self.code,
            }
        }


class GenerationFailedError(ApiError):
    """The engine gave up on a request that was fine; the reason is the engine's."""

    def __init__(self, reason: str) -> None:
        super().__init__(500, f"generation failed: {reason}", code="engine_error")


class DeadlineExceededError(ApiError):
    """The time that whoever asked gave this request is over; its request has ended."""

    # Who has no time left decides alone whether to begin anew.
    should_retry = False

    def __init__(self, timeout_s: float) -> None:
        super().__init__(
            504,
            f"the {timeout_s:g} s that this request was given are over",
            code="deadline_exceeded",
        )


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the 400 for a request that can never succeed as it is."""
    return ApiError(400, message, param=param, code=code)
