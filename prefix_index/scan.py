"""Where special tokens stand in a rendered prompt."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# Occurrences of a token's first byte that are looked at one by one: two long messages have none
# but the template's own (then this is 4 times quicker), markup has thousands.
_MAX_FALSE_STARTS = 4


def segment_bounds(data: bytes, tokens: Sequence[bytes]) -> list[int]:
    """Return the offsets at which a text is cut before tokens, with 0 and its end around them.

    A token at the very beginning cuts nothing off.
    """
    bounds = [0]
    for token in tokens:
        _add_offsets(bounds, data, token)
    if len(tokens) > 1:
        bounds.sort()
    bounds.append(len(data))
    return bounds


def _add_offsets(bounds: list[int], data: bytes, token: bytes) -> None:
    """Append where ``token`` starts, without overlaps, from offset 1 on."""
    first, size = token[:1], len(token)
    num_false = 0
    # One byte is found at memory speed, a longer needle at one byte per cycle.
    at = data.find(first, 1)
    while at > 0:
        if data.startswith(token, at):
            bounds.append(at)
            at = data.find(first, at + size)
            continue
        num_false += 1
        if num_false > _MAX_FALSE_STARTS:
            break
        at = data.find(first, at + 1)
    at = data.find(token, at) if at > 0 else -1
    while at > 0:
        bounds.append(at)
        at = data.find(token, at + size)
