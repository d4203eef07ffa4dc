"""What kind of text it is that differs between two versions of one text."""

from __future__ import annotations

import re

from gateway.misses.causes import Cause, volatile_cause
from prefix_index.volatile import find_volatile

# Reaches over the longest volatile span, so that one around the place is seen whole.
WINDOW_CHARS = 1200
MAX_NUMBER_CHARS = 20
_NUMBER = re.compile(r"\d{1,2}:\d\d(?::\d\d)?(?![\w:])|\d{1,20}(?![\w:])")
# Shorter lines ("Answer:", "</doc>") stand in every text.
MIN_PASSAGE_CHARS = 16


def first_char(left: str, right: str) -> int:
    """Return the first character where two texts differ or one of them ends."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[:middle] == right[:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def volatile_at(text: str, before: str, char: int) -> Cause | None:
    """Return the kind of volatile text that stands at a position of either text."""
    start = max(0, char - WINDOW_CHARS)
    for each in (text, before):
        for span in find_volatile(each[start : char + WINDOW_CHARS]):
            if span.start_char <= char - start <= span.end_char:
                return volatile_cause(span.kind)
    return _changed_number(text, before, char)


def _changed_number(text: str, before: str, char: int) -> Cause | None:
    """Name a bare clock or number: that it changed is evidence that its shape alone is not."""
    start = max(0, char - MAX_NUMBER_CHARS)
    at = char
    while at > start and (text[at - 1].isdigit() or text[at - 1] == ":"):
        at -= 1
    if at and text[at - 1].isalnum():
        return None  # part of a name
    new, old = _NUMBER.match(text, at), _NUMBER.match(before, at)
    if new is None or old is None or new.group() == old.group():
        return None
    return Cause.DATETIME if ":" in new.group() and ":" in old.group() else Cause.COUNTER


def is_reordered(text: str, before: str) -> bool:
    """Whether the two texts have most of their passages (lines) in common, in another order."""
    lines, lines_before = _passages(text), _passages(before)
    shared = lines.keys() & lines_before.keys()
    if len(shared) < 2 or 2 * len(shared) < len(lines):
        return False
    return [p for p in lines if p in shared] != [p for p in lines_before if p in shared]


def _passages(text: str) -> dict[str, None]:
    lines = (line.strip() for line in text.splitlines())
    return dict.fromkeys(line for line in lines if len(line) >= MIN_PASSAGE_CHARS)
