"""How an attempt at a worker ended, and what the worker reported about it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final


class Outcome(StrEnum):
    """How an attempt at a worker ended (bounded: it is a metric label)."""

    OK = "ok"
    CLIENT_CLOSED = "client_closed"
    CONNECT_FAILED = "connect_failed"
    UPSTREAM_RESET = "upstream_reset"  # the connection ended before the first byte
    FIRST_BYTE_TIMEOUT = "first_byte_timeout"
    UPSTREAM_ERROR = "upstream_error"  # the engine answered 5xx
    TRUNCATED = "truncated"  # the connection ended after the first byte
    REJECTED = "rejected"  # the engine answered 4xx
    DEADLINE = "deadline"  # the client's own time, or that of any request, was over
    CANCELLED = "cancelled"  # the gateway gave up: shutdown


# Members that requests ask for: to find one on its class takes 0.2 us each time.
OK: Final = Outcome.OK

# A deadline is no verdict: a long prefill is not a dead worker, nor is a client in a hurry.
WORKER_FAILURES = frozenset(
    {Outcome.CONNECT_FAILED, Outcome.UPSTREAM_RESET, Outcome.UPSTREAM_ERROR, Outcome.TRUNCATED}
)
WORKER_ANSWERS = frozenset({Outcome.OK, Outcome.REJECTED})


# Its constructor is written out, since one that a dataclass makes itself is not compiled.
@dataclass(slots=True, init=False)
class Usage:
    """Token counts as the worker reported them; None where it did not."""

    prompt_tokens: int | None
    completion_tokens: int | None
    cached_tokens: int | None

    def __init__(
        self,
        prompt_tokens: int | None = None,
        completion_tokens: int | None = None,
        cached_tokens: int | None = None,
    ) -> None:
        self.prompt_tokens = prompt_tokens
        self.completion_tokens = completion_tokens
        self.cached_tokens = cached_tokens


def is_comparable(body: dict[str, Any]) -> bool:
    """Whether the reported token counts are those of one prompt and one completion.

    Of several prompts only the first is read but all are counted, several choices are counted
    together, and prompts whose own probabilities are asked for are computed without the cache.
    """
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) > 1 and isinstance(prompt[0], str | list):
        return False
    is_one_choice = body.get("n") in (None, 1) and body.get("best_of") in (None, 1)
    return is_one_choice and body.get("prompt_logprobs") is None and not body.get("echo")
