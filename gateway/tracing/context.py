"""The headers in which callers and workers tell each other which trace a request belongs to.

Source: W3C Trace Context (https://www.w3.org/TR/trace-context-2/), 3.2 traceparent, 3.3 tracestate.
Baggage is nobody's business here and goes through as it came.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

SAMPLED = 0x01
# Says that the ids are random; passed on, since they stay the same.
RANDOM_IDS = 0x02
_HEADERS = frozenset((b"traceparent", b"tracestate"))
# A version above 00 may have more behind the flags, after another dash.
_TRACEPARENT = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_NO_TRACE, _NO_SPAN = "0" * 32, "0" * 16
# 3.3.1.1: at least these must be passed on; beyond them the list is dropped as a whole.
_MAX_MEMBERS = 32
_MAX_STATE_CHARS = 8192
_KEY = r"[a-z][_0-9a-z\-*/]{0,255}|[a-z0-9][_0-9a-z\-*/]{0,240}@[a-z][_0-9a-z\-*/]{0,13}"
_VALUE = r"[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
_MEMBER = re.compile(f"({_KEY})=({_VALUE})")


class Parent(NamedTuple):
    """The span that a request is a part of, as its client told."""

    trace_id: int
    span_id: int
    flags: int


def parse_traceparent(value: str) -> Parent | None:
    """Read a ``traceparent``; None if it is not valid and so is to be treated as absent."""
    match = _TRACEPARENT.fullmatch(value)
    if match is None:
        return None
    version, trace, span, flags, more = match.groups()
    if version == "ff" or (version == "00" and more is not None):
        return None
    if trace == _NO_TRACE or span == _NO_SPAN:
        return None
    return Parent(int(trace, 16), int(span, 16), int(flags, 16))


def traceparent(trace_id: int, span_id: int, flags: int) -> str:
    """Write a ``traceparent`` of version 00."""
    return f"00-{trace_id:032x}-{span_id:016x}-{flags:02x}"


def tracestate(raw: Iterable[tuple[bytes, bytes]]) -> Sequence[tuple[str, str]]:
    """Read all ``tracestate`` headers; empty if there is none or any of them is not valid."""
    values = [value for name, value in raw if name.lower() == b"tracestate"]
    text = b",".join(values).decode("latin-1")
    if not text or len(text) > _MAX_STATE_CHARS:
        return ()
    members: dict[str, str] = {}
    for member in text.split(","):
        if not (member := member.strip(" \t")):
            continue  # 3.3.1.1: empty members are allowed
        match = _MEMBER.fullmatch(member)
        if match is None or match[1] in members:
            return ()
        members[match[1]] = match[2]
    return tuple(members.items()) if len(members) <= _MAX_MEMBERS else ()


def num_traceparents(raw: Iterable[tuple[bytes, bytes]]) -> int:
    """Count the ``traceparent`` headers: of several none is to be believed."""
    return sum(name.lower() == b"traceparent" for name, _ in raw)


def without_context(raw: Iterable[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    """Leave out the headers that are told anew to workers."""
    return [pair for pair in raw if pair[0].lower() not in _HEADERS]
