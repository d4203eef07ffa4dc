"""Watch a stream of server-sent events go by: first token, usage, how it ended.

The bytes are passed on as they are; only events are never cut in two, so that a failure can be told
between events. Nothing is parsed per piece: JSON is read for the first events until a token shows,
and for the last ones once, at the end. Pure: no I/O, no clock.

Source: WHATWG HTML, 9.2 "Server-sent events" (line ends CR, LF, CRLF; blank line ends an event).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import orjson

from gateway.routing.dispatch import Usage

if TYPE_CHECKING:
    from collections.abc import Iterator

# Holds the finish, usage and end events of every known engine, with room for log probabilities.
TAIL_BYTES = 16 << 10
# An event larger than this is passed on in parts (vLLM can echo all prompt token ids in one).
MAX_HELD_BYTES = 256 << 10
# Events with choices that are read from the end: with n > 1 each choice finishes in its own.
MAX_LAST_CHOICES = 8
_BOUNDARIES = (b"\n\n", b"\r\n\r\n", b"\r\r")
_DONE = b"[DONE]"
# A delta with none but these says that a message begins, not what is in it.
_EMPTY_DELTA_KEYS = frozenset(("role",))


@dataclass(slots=True, frozen=True)
class StreamEnd:
    """How a stream ended, as far as its events tell.

    ``is_complete``: the end marker or a finish reason was there. ``is_error``: one of the last
    events is an error object, whatever else followed.
    """

    is_complete: bool
    is_error: bool
    usage: Usage | None


class StreamObserver:
    """Observes one stream; fed every piece in order.

    Attributes:
        has_token: Whether an event with content, a tool call or text has gone by.
        is_mid_event: Whether the bytes passed on so far end inside an event.
    """

    __slots__ = ("_held", "_tail", "_tail_bytes", "has_token", "is_mid_event")

    def __init__(self) -> None:
        self.has_token = False
        self.is_mid_event = False
        self._held = bytearray()
        self._tail: list[bytes] = []
        self._tail_bytes = 0

    def feed(self, data: bytes) -> bytes:
        """Take a piece and return the bytes to pass on: all that end with a whole event."""
        if self._held or not data.endswith(b"\n\n"):
            data = self._cut(data)
            if not data:
                return b""
        else:
            self.is_mid_event = False
        if not self.has_token:
            self.has_token = any(map(_has_token, _documents(data)))
        self._tail.append(data)
        self._tail_bytes += len(data)
        if self._tail_bytes > 2 * TAIL_BYTES:
            self._trim()
        return data

    def rest(self) -> bytes:
        """Return the bytes held back because their event never ended."""
        return bytes(self._held)

    def end(self) -> StreamEnd:
        """Read the last events: call once, when nothing more will come."""
        is_done = is_finished = is_error = False
        usage: Usage | None = None
        num_choices = 0
        for data in reversed(list(_events(b"".join(self._tail) + self._held))):
            if data == _DONE:
                is_done = True
            elif isinstance(document := _json(data), dict):
                usage = usage or usage_of(document)
                is_error = is_error or bool(document.get("error"))
                if document.get("choices"):
                    is_finished = is_finished or _is_finished(document)
                    num_choices += 1
                    if num_choices >= MAX_LAST_CHOICES:
                        break
        return StreamEnd(is_done or is_finished, is_error, usage)

    def _trim(self) -> None:
        """Forget all but the last pieces: as many as make up ``TAIL_BYTES``, and at least one."""
        tail, size = self._tail, self._tail_bytes
        dropped = 0
        while size - len(tail[dropped]) >= TAIL_BYTES:
            size -= len(tail[dropped])
            dropped += 1
        del tail[:dropped]
        self._tail_bytes = size

    def _cut(self, data: bytes) -> bytes:
        """Return the held bytes and ``data`` up to the last end of an event; hold the rest."""
        held = self._held
        # A boundary may lie across the joint, and is four bytes at most.
        start = max(0, len(held) - 3)
        held += data
        found = ((held.rfind(mark, start), len(mark)) for mark in _BOUNDARIES)
        end = max(at + length if at >= 0 else 0 for at, length in found)
        if not end and len(held) <= MAX_HELD_BYTES:
            return b""
        whole = bytes(held[:end]) if end else bytes(held)
        self.is_mid_event = not end
        del held[: len(whole)]
        return whole


def usage_of(document: dict[str, Any]) -> Usage | None:
    """Return the token counts of an answer or event, None if it has none."""
    usage = document.get("usage")
    if not isinstance(usage, dict) or not isinstance(usage.get("prompt_tokens"), int):
        return None
    details = usage.get("prompt_tokens_details")
    cached = details.get("cached_tokens") if isinstance(details, dict) else None
    completion = usage.get("completion_tokens")
    return Usage(
        usage["prompt_tokens"],
        completion if isinstance(completion, int) else None,
        cached if isinstance(cached, int) else None,
    )


def usage_in_body(body: bytes) -> Usage | None:
    """Return the token counts of a complete JSON answer."""
    document = _json(body)
    return usage_of(document) if isinstance(document, dict) else None


def _events(data: bytes) -> Iterator[bytes]:
    """Yield the data of each event; comments and other fields are skipped."""
    if b"\r" in data:
        data = data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")
    for block in data.split(b"\n\n"):
        lines = [
            line[6:] if line.startswith(b"data: ") else line[5:]
            for line in block.split(b"\n")
            if line.startswith(b"data:")
        ]
        if lines:
            yield b"\n".join(lines).strip()


def _documents(data: bytes) -> Iterator[dict[str, Any]]:
    for event in _events(data):
        if isinstance(document := _json(event), dict):
            yield document


def _json(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None


def _choices(document: dict[str, Any]) -> Iterator[dict[str, Any]]:
    choices = document.get("choices")
    if isinstance(choices, list):
        yield from (choice for choice in choices if isinstance(choice, dict))


def _has_token(document: dict[str, Any]) -> bool:
    for choice in _choices(document):
        delta = choice.get("delta")
        if choice.get("text") or (
            isinstance(delta, dict)
            and any(value for key, value in delta.items() if key not in _EMPTY_DELTA_KEYS)
        ):
            return True
    return False


def _is_finished(document: dict[str, Any]) -> bool:
    return any(choice.get("finish_reason") for choice in _choices(document))
