"""How a worker's answer is read on its way to the client, and what becomes of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from gateway.protocols.surfaces import Markers


class Events(Protocol):
    """Translates one stream of events."""

    def feed(self, data: bytes) -> bytes:
        """Take whole events; return those for the client.

        Raises:
            UpstreamError: If they cannot be translated.
        """

    def end(self) -> bytes:
        """Return what ends a stream that ended well."""


class Translation(Protocol):
    """Translates the answer to one request."""

    def body(self, status: int, body: bytes) -> bytes:
        """Return a whole answer.

        Raises:
            UpstreamError: If it is not what was expected.
        """

    def events(self) -> Events:
        """Return what translates a stream."""


@dataclass(frozen=True, slots=True)
class Hearing:
    """How an answer is read.

    Attributes:
        markers: Whose events its stream has, which says how it ends.
        strips_usage: Whether the event that tells the usage is for the gateway alone.
        translation: Makes of it what the client understands; None = it is passed on as it is.
        is_ours: Whether the prompt is the one that was read here, so that the reported counts can
            be compared with ours and learned from.
        passes_at_once: Whether whatever is not JSON is passed on as it comes, such as sound.
        kept: Told the answer, or its stream's first event, if it is an object.
    """

    markers: Markers = "choices"
    strips_usage: bool = False
    translation: Translation | None = None
    is_ours: bool = True
    passes_at_once: bool = False
    kept: Callable[[dict[str, Any]], None] | None = None


PLAIN = Hearing()
WITHOUT_USAGE = Hearing(strips_usage=True)
