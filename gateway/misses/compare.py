"""Where two prompts part, and how much of the one's rest the other holds too."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from prefix_index.blocks import BlockHash

# Runs shorter than this are the template's own tokens and common phrases, not the same text.
MIN_RUN_TOKENS = 16
# After this many tokens another thread may run: about 1 ms.
_YIELD_TOKENS = 4096


def shared_blocks(left: Sequence[BlockHash], right: Sequence[BlockHash], num_blocks: int) -> int:
    """Return how many leading blocks, ``num_blocks`` at most, two chains have in common.

    Equal hashes have equal parents, so the first difference is found by bisection.
    """
    low, high = 0, min(len(left), len(right), num_blocks)
    while low < high:
        middle = (low + high + 1) // 2
        if left[middle - 1] == right[middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def first_difference(left: Sequence[int], right: Sequence[int], start: int) -> int:
    """Return the first position from ``start`` on where two prompts' tokens differ or one ends."""
    at, end = start, min(len(left), len(right))
    while at < end and left[at] == right[at]:
        at += 1
    return at


def known_tokens(tokens: array[int], other: array[int]) -> int:
    """Return how many of ``tokens`` stand in ``other`` too, in runs of ``MIN_RUN_TOKENS`` or more.

    Each run of ``other`` counts once, wherever it stands. O(both lengths); for a thread, it lets
    others run in between.
    """
    size = tokens.itemsize
    left, right = tokens.tobytes(), other.tobytes()
    suffix = _common_suffix(left, right, size)
    if suffix < MIN_RUN_TOKENS * size:
        suffix = 0
    left, right = left[: len(left) - suffix], right[: len(right) - suffix]
    return suffix // size + _in_runs(left, right, size)


def _common_suffix(left: bytes, right: bytes, size: int) -> int:
    low, high = 0, min(len(left), len(right)) // size
    while low < high:
        middle = (low + high + 1) // 2
        if left[len(left) - middle * size :] == right[len(right) - middle * size :]:
            low = middle
        else:
            high = middle - 1
    return low * size


def _in_runs(left: bytes, right: bytes, size: int) -> int:
    """Count the tokens of ``left`` in runs that ``right`` has too, by counting equal windows."""
    window = MIN_RUN_TOKENS * size
    counts: dict[bytes, int] = {}
    for number, at in enumerate(range(0, len(right) - window + size, size)):
        if number % _YIELD_TOKENS == 0:
            time.sleep(0)
        piece = right[at : at + window]
        counts[piece] = counts.get(piece, 0) + 1
    known = 0
    covered_to = 0
    for number, at in enumerate(range(0, len(left) - window + size, size)):
        if number % _YIELD_TOKENS == 0:
            time.sleep(0)
        piece = left[at : at + window]
        if counts.get(piece, 0):
            counts[piece] -= 1
            known += at + window - max(at, covered_to)
            covered_to = at + window
    return known // size
