"""Change top-level members of a JSON object as a splice of its bytes.

Everything that is not edited keeps its bytes: 64-bit integers, ``1.0``, escapes, white space, the
order of keys. Same-named keys inside nested values are not touched.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import orjson

from prefix_index.canonical.spans import members, skip_space

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping


def insert(body: bytes, put: Mapping[str, bytes]) -> bytes:
    """Return ``body`` with members added at its end; costs one copy, whatever its size.

    Args:
        body: A JSON object with a member, which a parser has accepted.
        put: Encoded JSON value by name, of names that it does not have.
    """
    end = body.rindex(b"}")
    added = b"".join([b"," + orjson.dumps(name) + b":" + value for name, value in put.items()])
    view = memoryview(body)  # a slice would be a second copy
    return b"".join((view[:end], added, view[end:]))


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
        pieces.append(body[: found[0].start] if found else body[: skip_space(body, 0) + 1])
    elif added:
        pieces.append(b",")
    pieces.append(b",".join(added))
    pieces.append(body[found[-1].end :] if found else body[skip_space(body, 0) + 1 :])
    return b"".join(pieces)
