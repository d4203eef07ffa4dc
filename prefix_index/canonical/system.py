"""The system segment's texts: where they stand in a body and in its bytes, line by line.

Lines are moved and cut as slices of the JSON string literals themselves, so that their escapes
stay what they were.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any, NamedTuple

from prefix_index.canonical.spans import Span, locate

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_ROLES = ("system", "developer")
_TEXT_TYPES = ("text", "input_text")
_ESCAPE = re.compile(rb"\\(?:u[0-9a-fA-F]{4}|.)", re.DOTALL)
_NEWLINES = (rb"\n", rb"\u000a", rb"\u000A")

Path = tuple[str | int, ...]


class Text(NamedTuple):
    """One text of the system segment.

    Attributes:
        path: Names and indexes that lead to it in the body.
        text: The text.
    """

    path: Path
    text: str


def system_texts(body: Mapping[str, Any]) -> Iterator[Text]:
    """Yield the texts of the leading system messages, in order; other parts are passed over."""
    messages = body.get("messages")
    for m, message in enumerate(messages if isinstance(messages, list) else ()):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            return
        content = message.get("content")
        if isinstance(content, str):
            yield Text(("messages", m, "content"), content)
        elif isinstance(content, list):
            yield from _parts(content, m)


def _parts(content: list[Any], m: int) -> Iterator[Text]:
    for p, part in enumerate(content):
        path: Path = ("messages", m, "content", p)
        if isinstance(part, str):
            yield Text(path, part)
        elif isinstance(part, dict) and part.get("type") in _TEXT_TYPES:
            text = part.get("text")
            if isinstance(text, str):
                yield Text((*path, "text"), text)


def literal(raw: bytes, path: Path) -> Span:
    """Return where the inside of a string literal stands, without its quotes.

    Args:
        raw: JSON that a parser has accepted.
        path: Leads to a string.
    """
    span = locate(raw, path)
    return Span(span.start + 1, span.end - 1)


def literal_lines(inside: bytes) -> list[bytes]:
    """Split the inside of a string literal at its newlines, as ``str.split`` does its text."""
    lines = []
    start = 0
    for escape in _ESCAPE.finditer(inside):
        if escape.group() in _NEWLINES:
            lines.append(inside[start : escape.start()])
            start = escape.end()
    lines.append(inside[start:])
    return lines
