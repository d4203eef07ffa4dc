"""The data of server-sent events, as documents. Pure.

Source: WHATWG HTML, 9.2 "Server-sent events" (line ends CR, LF, CRLF; blank line ends an event).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterator


def events(data: bytes) -> Iterator[bytes]:
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


def documents(data: bytes) -> Iterator[dict[str, Any]]:
    """Yield the events that are JSON objects."""
    for event in events(data):
        if isinstance(document := parsed(event), dict):
            yield document


def parsed(data: bytes) -> Any:
    """Return what JSON says, None if it is none."""
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError:
        return None
