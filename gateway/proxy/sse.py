"""Watch a stream of server-sent events go by: first token, usage, how it ended.

The bytes are passed on as they are; only events are never cut in two, so that a failure can be told
between events, and an event with usage that the client did not ask for is left out. Nothing is
parsed per piece: JSON is read for the first events until a token shows, and for the last ones once,
at the end. Pure: no I/O, no clock.

``StreamObserver`` is for chat and text completions; the other APIs' are in
``gateway/proxy/sse_typed.py``.

Source: WHATWG HTML, 9.2 "Server-sent events" (line ends CR, LF, CRLF; blank line ends an event).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gateway.protocols.events import documents, events_from_last, parsed
from gateway.protocols.whole import usage_told
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
_BOUNDARY = re.compile(rb"(?:\r\n\r\n|\n\n|\r\r)")
_NO_CHOICES = re.compile(rb'"choices"\s*:\s*\[\s*\]')
_COUNTS = b'"prompt_tokens"'
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

    Args:
        strips_usage: Whether the event that tells the usage is for the gateway alone.

    Attributes:
        has_token: Whether an event with content, a tool call or text has gone by.
        is_mid_event: Whether the bytes passed on so far end inside an event.
        first: The first event that is an object.
    """

    __slots__ = (
        *("_held", "_strips_usage", "_tail", "_tail_bytes", "first", "has_token", "is_mid_event"),
        *("_event_bytes", "_num_bytes"),
    )

    def __init__(self, *, strips_usage: bool = False) -> None:
        self.has_token = False
        self.is_mid_event = False
        self.first: dict[str, Any] | None = None
        self._num_bytes = 0
        self._event_bytes = 1
        self._strips_usage = strips_usage
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
            self._look_for_token(data)
        size = len(data)
        self._num_bytes += size
        self._tail.append(data)
        self._tail_bytes += size
        if self._tail_bytes > 2 * TAIL_BYTES:
            self._trim()
        # ``in`` would try to read the needle as a number first, for an error made and dropped.
        if self._strips_usage and data.find(_COUNTS) >= 0:
            return _without_usage(data)
        return data

    @property
    def num_events(self) -> int:
        """How many events have gone by, if all were as long as the first with a token."""
        return self._num_bytes // self._event_bytes

    def rest(self) -> bytes:
        """Return the bytes held back because their event never ended."""
        rest = bytes(self._held)
        return _without_usage(rest) if self._strips_usage else rest

    def end(self, *, is_cut: bool = False) -> StreamEnd:
        """Read the last events: call once, when nothing more will come.

        Args:
            is_cut: Whether the connection broke. What came before may be the whole stream still.
        """
        is_done = is_finished = is_error = False
        usage: Usage | None = None
        num_choices = 0
        for data in self.events_from_last():
            if data == _DONE:
                is_done = True
            elif isinstance(document := parsed(data), dict):
                usage = usage or usage_of(document)
                is_error = is_error or bool(document.get("error"))
                if document.get("choices"):
                    is_finished = is_finished or _is_finished(document)
                    num_choices += 1
                    if num_choices >= MAX_LAST_CHOICES:
                        break
        return StreamEnd(is_done or is_finished, is_error, usage)

    def _look_for_token(self, data: bytes) -> None:
        for document in documents(data):
            self.first = self.first or document
            if self._is_token(document):
                self.has_token = True
                self._event_bytes = len(data) // (data.count(b"\n\n") or 1)
                return

    def _is_token(self, document: dict[str, Any]) -> bool:
        """Whether an event brings something that was generated."""
        return _has_token(document)

    def events_from_last(self) -> Iterator[bytes]:
        """Yield the data of the last events, as far as they are kept, the very last one first."""
        return events_from_last(b"".join(self._tail) + self._held)

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
    """Return the token counts of an event of any API, None if it has none."""
    usage = document.get("usage")
    return _counts(usage) if isinstance(usage, dict) else None


def usage_in_body(body: bytes) -> Usage | None:
    """Return the token counts of a complete JSON answer."""
    usage = usage_told(body)
    return None if usage is None else _counts(usage)


def _counts(usage: dict[str, Any]) -> Usage | None:
    """Read a ``usage``; of Anthropic's the prompt is what was read from the cache and the rest."""
    if isinstance(usage.get("prompt_tokens"), int):
        details = usage.get("prompt_tokens_details")
        cached = details.get("cached_tokens") if isinstance(details, dict) else None
        return Usage(usage["prompt_tokens"], _count(usage.get("completion_tokens")), _count(cached))
    prompt = usage.get("input_tokens")
    if not isinstance(prompt, int):
        return None
    details = usage.get("input_tokens_details")
    if isinstance(details, dict):
        cached = _count(details.get("cached_tokens"))
    else:
        cached = _count(usage.get("cache_read_input_tokens"))
        prompt += (cached or 0) + (_count(usage.get("cache_creation_input_tokens")) or 0)
    return Usage(prompt, _count(usage.get("output_tokens")), cached)


def _count(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _without_usage(data: bytes) -> bytes:
    """Leave out the events that have usage and no choices; all other bytes stay."""
    if _NO_CHOICES.search(data) is None:
        return data
    kept, start = [], 0
    ends = [match.end() for match in _BOUNDARY.finditer(data)]
    for end in [*ends, len(data)]:
        event = data[start:end]
        if not _is_usage_only(event):
            kept.append(event)
        start = end
    return b"".join(kept)


def _is_usage_only(event: bytes) -> bool:
    if _COUNTS not in event or _NO_CHOICES.search(event) is None:
        return False
    found = list(documents(event))
    return (
        len(found) == 1
        and found[0].get("choices") == []
        and isinstance(found[0].get("usage"), dict)
        and not found[0].get("error")
    )


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
