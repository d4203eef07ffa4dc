"""Rule ``volatile-tail``: move lines that change per request to the end of the system segment.

Only a whole short line moves, and only one that announces what it is ("Current time: ...",
"Request id: ...") or holds nothing else: dates and ids inside prose are content. Nothing is
deleted, and lines keep their order among themselves.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from prefix_index.canonical.spans import Edit
from prefix_index.canonical.system import Text, literal, literal_lines, system_texts
from prefix_index.volatile import find_volatile

if TYPE_CHECKING:
    from collections.abc import Mapping

# A clock with its label, or an id with its label; more is prose.
_MAX_LINE_CHARS = 200
_LABEL = re.compile(
    r"""\s*(?:[-*>]\s+)?[*_]{0,2}
    (?:(?:the|your|this|our)\s+)?
    (?:x-anthropic-billing-header\b
      |(?:current|present|local|server|system|user)[\s_-]+(?:\w+[\s_-]+)?
       (?:time|date|datetime|timestamp|day)
      |(?:today|now|it\s+is|as\s+of|utc)\b
      |(?:date(?:\s*(?:and|&|/)\s*time)?|time|datetime|timestamp|clock)\s*(?:[:=*_]|is\b)
      |(?:generated|rendered|sent|requested|created)\s+(?:at|on)\b
      |(?:request|session|trace|span|conversation|chat|message|run|job|correlation|invocation
         |turn|call|build|instance)
       (?:[\s_-]*(?:id|uuid|guid|no|nr|number|counter|key|token|\#))?\s*(?:[:=#*_]|is\b|[0-9a-f])
      |(?:nonce|uuid|guid|random|seed|salt)\s*(?:[:=*_]|is\b)
    )""",
    re.IGNORECASE | re.VERBOSE,
)
# Quotes, brackets or a full stop around a bare clock.
_MAX_BARE_CHARS = 3
# How a bare clock, date or id begins.
_BARE = re.compile(
    r"""\s*["'(\[]?
    (?:\d{1,4}[-/.:]\d|\d{1,2}\ [A-Z]|[0-9a-fA-F]{8}|[A-Z][a-z]{2,8}(?:,?\ \d|,\ [A-Z]))
    """,
    re.VERBOSE,
)
_DIGIT = re.compile(r"\d")
# With the size of the memory: at most 4 MB of texts.
_MAX_KNOWN_CHARS = 32_768
_FENCE = re.compile(r"\s*(?:```|~~~)")


class Tail(NamedTuple):
    """What the rule says about one body: how many lines move, and by which edits."""

    num_lines: int = 0
    edits: tuple[Edit, ...] = ()


def move_volatile(body: Mapping[str, Any], raw: bytes) -> Tail:
    """Return the edits that put the volatile lines last; none when they are last already."""
    texts = list(system_texts(body))
    movable = [_movable(text.text) for text in texts]
    if not any(movable) or _is_last(texts, movable):
        return Tail()
    edits = []
    moved: list[bytes] = []
    for t, text in enumerate(texts):
        is_end = t == len(texts) - 1
        if not movable[t] and not is_end:
            continue
        inside = literal(raw, text.path)
        lines = literal_lines(raw[inside.start : inside.end])
        moved += [lines[i] for i in movable[t]]
        kept = [line for i, line in enumerate(lines) if i not in movable[t]]
        if is_end:
            _append(kept, moved)
        edits.append(Edit(inside.start, inside.end, rb"\n".join(kept)))
    return Tail(sum(map(len, movable)), tuple(edits))


def _movable(text: str) -> frozenset[int]:
    """Return the numbers of the lines that may move."""
    # Most system texts come again and again, without a clock.
    return _known_movable(text) if len(text) <= _MAX_KNOWN_CHARS else _find_movable(text)


def _find_movable(text: str) -> frozenset[int]:
    lines = text.split("\n")
    found = [
        i for i, line in enumerate(lines) if len(line) <= _MAX_LINE_CHARS and _is_volatile(line)
    ]
    if not found:
        return frozenset()
    # A line of a listing belongs where it stands.
    fences = [i for i, line in enumerate(lines) if _FENCE.match(line)]
    return frozenset(i for i in found if bisect_left(fences, i) % 2 == 0)


_known_movable = lru_cache(maxsize=128)(_find_movable)


def _is_volatile(line: str) -> bool:
    """Say whether a line is about something that changes: announced by a label, or nothing else."""
    if _LABEL.match(line):
        return _DIGIT.search(line) is not None and bool(find_volatile(line))
    if not _BARE.match(line):
        return False
    covered = sum(span.end_char - span.start_char for span in find_volatile(line))
    return covered > 0 and len(line.strip()) - covered <= _MAX_BARE_CHARS


def _is_last(texts: list[Text], movable: list[frozenset[int]]) -> bool:
    """Say whether nothing but blank lines and volatile ones follows the first volatile line."""
    has_volatile = False
    for text, numbers in zip(texts, movable, strict=True):
        for i, line in enumerate(text.text.split("\n")):
            if i in numbers:
                has_volatile = True
            elif has_volatile and line.strip():
                return False
    return True


def _append(kept: list[bytes], moved: list[bytes]) -> None:
    """Put the moved lines behind the last line, before the newlines that end the text."""
    end = len(kept)
    while end and not kept[end - 1]:
        end -= 1
    kept[end:end] = moved
