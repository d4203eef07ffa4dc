"""Watch the streams of APIs whose events have types: Anthropic's messages, OpenAI's responses.

Also those of paths that are passed on unread, of whose events nothing is known.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gateway.protocols.events import parsed
from gateway.proxy.sse import StreamEnd, StreamObserver, usage_of
from gateway.routing.dispatch import Usage

if TYPE_CHECKING:
    from gateway.protocols.surfaces import Markers

# Types of the events that end a stream well.
_LAST = {
    "messages": frozenset(("message_stop",)),
    "responses": frozenset(("response.completed", "response.incomplete")),
}
_FAILED = frozenset(("error", "response.failed"))
# What a stream's last event begins with, where it is too long to be held: a whole response can be.
_LAST_BEGINS = (b"event: response.completed", b"event: response.incomplete")
# Blocks of a message whose start is its first token.
_GENERATED = frozenset(("tool_use", "server_tool_use"))


class TypedObserver(StreamObserver):
    """Observes one stream of typed events.

    Args:
        markers: Whose events they are.
    """

    __slots__ = ("_begins", "_is_last_seen", "_last")

    def __init__(self, markers: Markers) -> None:
        super().__init__()
        self._last = _LAST[markers]
        self._begins: Usage | None = None
        self._is_last_seen = False

    def feed(self, data: bytes) -> bytes:
        """Take a piece and return the bytes to pass on: all that end with a whole event."""
        whole = super().feed(data)
        if self.is_mid_event and whole.startswith(_LAST_BEGINS):
            self._is_last_seen = True
        return whole

    def end(self, *, is_cut: bool = False) -> StreamEnd:
        """Read the last events; see the base."""
        is_complete, is_error = self._is_last_seen, False
        usage: Usage | None = None
        for data in self.events_from_last():
            document = parsed(data)
            if not isinstance(document, dict):
                continue
            kind = document.get("type")
            is_complete = is_complete or kind in self._last
            is_error = is_error or kind in _FAILED or bool(document.get("error"))
            response = document.get("response")
            usage = usage or usage_of(response if isinstance(response, dict) else document)
            usage = usage or self._ends_with(document)
        return StreamEnd(is_complete or is_error, is_error, usage or self._begins)

    def _is_token(self, document: dict[str, Any]) -> bool:
        kind = document.get("type")
        if kind == "message_start" and isinstance(document.get("message"), dict):
            self._begins = usage_of(document["message"])
        if kind == "content_block_start":
            block = document.get("content_block")
            return isinstance(block, dict) and block.get("type") in _GENERATED
        return isinstance(kind, str) and kind.endswith(("_delta", ".delta"))

    def _ends_with(self, document: dict[str, Any]) -> Usage | None:
        """Return the usage of a message whose end tells only what was generated."""
        counts, begins = document.get("usage"), self._begins
        generated = counts.get("output_tokens") if isinstance(counts, dict) else None
        if begins is None or not isinstance(generated, int):
            return None
        return Usage(begins.prompt_tokens, generated, begins.cached_tokens)


class UnreadObserver(StreamObserver):
    """Observes a stream of which nothing is known: it is complete if its connection says so."""

    __slots__ = ()

    def end(self, *, is_cut: bool = False) -> StreamEnd:
        """Read the last events; see the base."""
        end = super().end()
        return StreamEnd(not is_cut, end.is_error, end.usage)

    def _is_token(self, document: dict[str, Any]) -> bool:
        return True


def observer_for(markers: Markers, *, strips_usage: bool = False) -> StreamObserver:
    """Return what watches a stream of one API."""
    if markers == "choices":
        return StreamObserver(strips_usage=strips_usage)
    return UnreadObserver() if markers == "none" else TypedObserver(markers)
