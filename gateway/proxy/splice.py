"""Change top-level members of a JSON object as a splice of its bytes.

Everything that is not edited keeps its bytes: 64-bit integers, ``1.0``, escapes, white space, the
order of keys. Same-named keys inside nested values are not touched.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

import orjson

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

_SPACE = re.compile(rb"[ \t\r\n]*")
# Possessive, so that a long string costs one pass and no backtracking.
_STRING = re.compile(rb'"(?:[^"\\]++|\\.)*+"', re.DOTALL)
# Numbers, true, false, null: up to a delimiter.
_SCALAR = re.compile(rb"[^,\]}\s]++")
# Everything up to the next bracket outside a string: one step per bracket, not per token.
_TO_BRACKET = re.compile(rb'(?:[^"\[\]{}]++|"(?:[^"\\]++|\\.)*+")*+', re.DOTALL)
_QUOTE, _COMMA, _BACKSLASH = b'",\\'
_OPEN = frozenset(b"[{")


class Member(NamedTuple):
    """One top-level member: its decoded name and the byte offsets of key and value."""

    name: str
    start: int
    value_start: int
    end: int


def members(body: bytes) -> list[Member]:
    """List the top-level members of a JSON object, in order, duplicates included.

    Args:
        body: A JSON object that a parser has accepted; on anything else the result is undefined.
    """
    found = []
    at = _space(body, _space(body, 0) + 1)
    while body[at] == _QUOTE:
        start, at = at, _STRING.match(body, at).end()  # type: ignore[union-attr]
        name = body[start + 1 : at - 1]
        decoded = orjson.loads(body[start:at]) if _BACKSLASH in name else name.decode()
        value_start = _space(body, _space(body, at) + 1)
        at = _value_end(body, value_start)
        found.append(Member(decoded, start, value_start, at))
        at = _space(body, at)
        if body[at] != _COMMA:
            break
        at = _space(body, at + 1)
    return found


def splice(
    body: bytes, *, put: Mapping[str, bytes] | None = None, drop: Collection[str] = ()
) -> bytes:
    """Return ``body`` with some top-level members replaced, inserted or removed.

    Args:
        body: A JSON object that a parser has accepted.
        put: Encoded JSON value by name. Every member of that name gets the value; where there is
            none, one is added at the end.
        drop: Names whose members are removed, with one comma each.
    """
    values = put or {}
    found = members(body)
    kept = [(i, member) for i, member in enumerate(found) if member.name not in drop]
    pieces: list[bytes] = []
    for position, (i, member) in enumerate(kept):
        if position == 0:
            pieces.append(body[: found[0].start])
        else:
            # The separator that stood before this member keeps its comma and white space.
            pieces.append(body[found[i - 1].end : member.start])
        value = values.get(member.name)
        if value is None:
            pieces.append(body[member.start : member.end])
        else:
            pieces.append(body[member.start : member.value_start] + value)
    names = {member.name for _, member in kept}
    added = [orjson.dumps(n) + b":" + value for n, value in values.items() if n not in names]
    if not kept:
        pieces.append(body[: found[0].start] if found else body[: _space(body, 0) + 1])
    elif added:
        pieces.append(b",")
    pieces.append(b",".join(added))
    pieces.append(body[found[-1].end :] if found else body[_space(body, 0) + 1 :])
    return b"".join(pieces)


def _space(body: bytes, at: int) -> int:
    return _SPACE.match(body, at).end()  # type: ignore[union-attr]


def _value_end(body: bytes, at: int) -> int:
    """Return the offset after the value that begins at ``at``."""
    if body[at] == _QUOTE:
        return _STRING.match(body, at).end()  # type: ignore[union-attr]
    if body[at] not in _OPEN:
        return _SCALAR.match(body, at).end()  # type: ignore[union-attr]
    depth = 0
    while True:
        at = _TO_BRACKET.match(body, at).end()  # type: ignore[union-attr]
        depth += 1 if body[at] in _OPEN else -1
        at += 1
        if depth == 0:
            return at
