"""Where values stand in the bytes of a JSON document.

Nothing is parsed and nothing recurses: a scan goes from bracket to bracket, so nesting of any
depth costs its length. Of members with one name the last one counts, as for the parsers that read
the same bytes.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import orjson

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

_SPACE = re.compile(rb"[ \t\r\n]*")
# Possessive, so that a long string costs one pass and no backtracking.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
# Numbers, true, false, null: up to a delimiter.
_SCALAR = re.compile(rb"[^,\]}\s]++")
# Everything up to the next bracket outside a string: one step per bracket, not per token.
_TO_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
_QUOTE, _COMMA, _BACKSLASH, _OPEN_LIST, _CLOSE_LIST, _OPEN_OBJECT = b'",\\[]{'
_OPEN = frozenset(b"[{")


class Member(NamedTuple):
    """One member of an object: its decoded name and the byte offsets of key and value."""

    name: str
    start: int
    value_start: int
    end: int


class Span(NamedTuple):
    """Byte offsets of a value."""

    start: int
    end: int


class Edit(NamedTuple):
    """Bytes that stand in for those of a span."""

    start: int
    end: int
    new: bytes


def members(raw: bytes, at: int = 0) -> list[Member]:
    """List the members of the object that begins at ``at``, in order, duplicates included.

    Args:
        raw: JSON that a parser has accepted; on anything else the result is undefined.
        at: Offset of the object; white space before it is skipped.
    """
    found = []
    at = skip_space(raw, skip_space(raw, at) + 1)
    while raw[at] == _QUOTE:
        start, at = at, _STRING.match(raw, at).end()  # type: ignore[union-attr]
        name = raw[start + 1 : at - 1]
        decoded = orjson.loads(raw[start:at]) if _BACKSLASH in name else name.decode()
        value_start = skip_space(raw, skip_space(raw, at) + 1)
        at = _value_end(raw, value_start)
        found.append(Member(decoded, start, value_start, at))
        at = skip_space(raw, at)
        if raw[at] != _COMMA:
            break
        at = skip_space(raw, at + 1)
    return found


def elements(raw: bytes, at: int) -> Iterator[Span]:
    """Yield the elements of the list that begins at ``at``; stop early to scan no further."""
    at = skip_space(raw, at + 1)
    while raw[at] != _CLOSE_LIST:
        end = _value_end(raw, at)
        yield Span(at, end)
        at = skip_space(raw, end)
        if raw[at] != _COMMA:
            return
        at = skip_space(raw, at + 1)


def find(raw: bytes, path: Sequence[str | int], at: int = 0) -> Span | None:
    """Return where the value under a path of names and indexes stands; None if there is none.

    Each level is scanned once, and nothing outside the values on the path more than once.
    """
    start = skip_space(raw, at)
    span = Span(start, start)
    for step in path:
        found = _member(raw, span.start, step) if isinstance(step, str) else None
        if isinstance(step, int) and raw[span.start] == _OPEN_LIST:
            found = next((e for i, e in enumerate(elements(raw, span.start)) if i == step), None)
        if found is None:
            return None
        span = found
    return span if path else Span(start, _value_end(raw, start))


def replace(raw: bytes, edits: Sequence[Edit]) -> bytes:
    """Return ``raw`` with some spans replaced and every other byte as it is.

    Args:
        raw: Any bytes.
        edits: Not overlapping, in the order of their offsets.
    """
    pieces: list[bytes] = []
    at = 0
    for edit in edits:
        pieces += raw[at : edit.start], edit.new
        at = edit.end
    pieces.append(raw[at:])
    return b"".join(pieces)


def skip_space(raw: bytes, at: int) -> int:
    """Return the offset of the first byte from ``at`` on that is not white space."""
    return _SPACE.match(raw, at).end()  # type: ignore[union-attr]


def _member(raw: bytes, at: int, name: str) -> Span | None:
    if raw[at] != _OPEN_OBJECT:
        return None
    found = None
    for member in members(raw, at):
        if member.name == name:
            found = Span(member.value_start, member.end)
    return found


def _value_end(raw: bytes, at: int) -> int:
    """Return the offset after the value that begins at ``at``."""
    if raw[at] == _QUOTE:
        return _STRING.match(raw, at).end()  # type: ignore[union-attr]
    if raw[at] not in _OPEN:
        return _SCALAR.match(raw, at).end()  # type: ignore[union-attr]
    depth = 0
    while True:
        at = _TO_BRACKET.match(raw, at).end()  # type: ignore[union-attr]
        depth += 1 if raw[at] in _OPEN else -1
        at += 1
        if depth == 0:
            return at
