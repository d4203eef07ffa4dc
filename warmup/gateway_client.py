"""The gateway's warm endpoint over HTTP: one request in, a stream of events out.

Errors are of two kinds: those that waiting may mend, and those that it will not. The admin token
is in no message.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import httpx
import orjson

from warmup.events import End, EventError, decode

if TYPE_CHECKING:
    from collections.abc import Iterator

    from warmup.events import Event

WARM_PATH = "/admin/v1/warm"
CONNECT_S = 10.0
# Eight MiB over the slowest link an operator would run this on.
WRITE_S = 120.0
# A heartbeat comes every few seconds, so this much silence is a dead stream.
SILENCE_S = 120.0
# A plan of a full batch has some hundred KiB.
MAX_LINE_BYTES = 32 << 20
MAX_ANSWER_BYTES = 64 << 20
# What waiting may mend: another run, an overload, a gateway that restarts.
_PASSING = frozenset({408, 409, 425, 429, 500, 502, 503, 504})


class AwayError(Exception):
    """The gateway cannot answer now.

    Attributes:
        retry_after_s: How long it wants to be left alone; None if it did not say.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class RefusedError(Exception):
    """The gateway will not do this, now or later."""


class BodyRefusedError(RefusedError):
    """The gateway will not take this body; parts of it may be welcome."""


class Gateway:
    """One gateway; used from one thread.

    Args:
        base: Its URL, without a trailing slash.
        token: The admin token; None sends none.
        silence_s: A stream that says nothing for so long is given up.
    """

    def __init__(self, base: str, token: str | None, silence_s: float = SILENCE_S) -> None:
        self.base = base
        self._token = token
        headers = {"accept-encoding": "identity"}
        if token:
            headers["authorization"] = f"Bearer {token}"
        # An operator's HTTP proxy has no business between two local processes.
        host = httpx.URL(base).host
        is_local = host in ("127.0.0.1", "localhost", "::1")
        self._http = httpx.Client(
            headers=headers,
            timeout=httpx.Timeout(silence_s, connect=min(CONNECT_S, silence_s), write=WRITE_S),
            trust_env=not is_local,
            # Requests are rare, and a kept connection may be dead by the next one.
            limits=httpx.Limits(max_keepalive_connections=0),
        )

    def close(self) -> None:
        """Close all connections; a running stream is thereby stopped."""
        self._http.close()

    @contextmanager
    def warm(self, body: bytes) -> Iterator[Iterator[tuple[Event, bytes]]]:
        """POST a request; gives (event, its line) as they come, up to and with the end.

        Leaving the block early closes the connection, which tells the gateway to stop.

        Raises:
            AwayError: If it does not answer, or the stream breaks or goes silent.
            BodyRefusedError: For 400 and 413.
            RefusedError: If it refuses for good.
        """
        headers = {"content-type": "application/json"}
        try:
            with self._http.stream(
                "POST", self.base + WARM_PATH, content=body, headers=headers
            ) as answer:
                self._check(answer)
                yield self._events(answer)
        except httpx.HTTPError as error:
            raise AwayError(self._said(f"no answer from the gateway: {_why(error)}")) from error

    def runs(self) -> dict[str, Any]:
        """Return ``GET /admin/v1/warm``: the current and the last runs.

        Raises:
            AwayError: If it does not answer, or with something else.
            RefusedError: If it refuses.
        """
        try:
            with self._http.stream("GET", self.base + WARM_PATH) as answer:
                self._check(answer)
                data = orjson.loads(_bounded(answer, MAX_ANSWER_BYTES))
        except httpx.HTTPError as error:
            raise AwayError(self._said(f"no answer from the gateway: {_why(error)}")) from error
        except ValueError as error:
            raise AwayError(self._said("expected JSON from the gateway")) from error
        if not isinstance(data, dict) or not isinstance(data.get("runs"), list):
            raise AwayError(self._said("expected its runs from the gateway"))
        return data

    def _events(self, answer: httpx.Response) -> Iterator[tuple[Event, bytes]]:
        for line in _lines(answer):
            if not line.strip():
                continue
            try:
                event = decode(line)
            except EventError as error:
                raise AwayError(self._said(str(error))) from error
            if event is not None:
                yield event, line
            if isinstance(event, End):
                return
        raise AwayError(self._said("the stream ended in the middle"))

    def _check(self, answer: httpx.Response) -> None:
        """Raise the error that fits a status that is not 200."""
        status = answer.status_code
        if status == 200:
            return
        error = _error_of(answer)
        text = self._said(f"{status}: {error.get('message') or answer.reason_phrase}")
        if status in _PASSING:
            raise AwayError(text, _retry_after_s(answer))
        if status in (400, 413):
            raise BodyRefusedError(text)
        if status in (401, 403):
            raise RefusedError(f"{text} (the admin token comes from --token-env)")
        if status == 404 and error.get("code") != "model_not_found":
            raise RefusedError(f"{text} (expected a Warmlane gateway that has {WARM_PATH})")
        raise RefusedError(text)

    def _said(self, text: str) -> str:
        """Return a message with the gateway's name, and without the token if it came back."""
        text = f"{self.base}: {text}"
        return text.replace(self._token, "***") if self._token else text


def _lines(answer: httpx.Response) -> Iterator[bytes]:
    """Split a stream at its newlines; what stands behind the last one is no line."""
    rest = bytearray()
    for chunk in answer.iter_raw():
        searched = len(rest)
        rest += chunk
        start = 0
        while (end := rest.find(b"\n", max(start, searched))) >= 0:
            yield bytes(rest[start:end])
            start = end + 1
        del rest[:start]
        if len(rest) > MAX_LINE_BYTES:
            raise httpx.ReadError(f"a line of more than {MAX_LINE_BYTES >> 20} MiB")


def _bounded(answer: httpx.Response, max_bytes: int) -> bytes:
    data = bytearray()
    for chunk in answer.iter_raw():
        data += chunk
        if len(data) > max_bytes:
            raise httpx.ReadError(f"an answer of more than {max_bytes >> 20} MiB")
    return bytes(data)


def _error_of(answer: httpx.Response) -> dict[str, Any]:
    try:
        data = orjson.loads(_bounded(answer, 1 << 20))
    except ValueError:
        return {}
    error = data.get("error") if isinstance(data, dict) else None
    return error if isinstance(error, dict) else {}


def _retry_after_s(answer: httpx.Response) -> float | None:
    try:
        seconds = float(answer.headers.get("retry-after", ""))
    except ValueError:
        return None
    return seconds if 0 <= seconds < float("inf") else None


def _why(error: httpx.HTTPError) -> str:
    if isinstance(error, httpx.ReadTimeout):
        return "silence for too long"
    return str(error) or type(error).__name__
