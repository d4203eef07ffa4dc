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
    for block in _plain(data).split(b"\n\n"):
        if (event := _data_of(block)) is not None:
            yield event


def events_from_last(data: bytes) -> Iterator[bytes]:
    """Yield the same as ``events``, the last one first; what nobody asks for is not looked at."""
    data = _plain(data)
    end = len(data)
    while end >= 0:
        at = data.rfind(b"\n\n", 0, end)
        if (event := _data_of(data[at + 2 if at >= 0 else 0 : end])) is not None:
            yield event
        end = at


def _plain(data: bytes) -> bytes:
    """Return events with LF as their only line end."""
    if data.find(b"\r") < 0:  # ``in`` makes and drops an error first
        return data
    return data.replace(b"\r\n", b"\n").replace(b"\r", b"\n")


def _data_of(block: bytes) -> bytes | None:
    lines = [
        line[6:] if line.startswith(b"data: ") else line[5:]
        for line in block.split(b"\n")
        if line.startswith(b"data:")
    ]
    return b"\n".join(lines).strip() if lines else None


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
