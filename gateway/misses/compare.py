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
# First guess at how much further a run goes; doubled while it is right.
_FIRST_STEP = 64
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
    """Count the tokens of ``left`` in runs that ``right`` has too.

    Every ``MIN_RUN_TOKENS``-th window of ``right`` is a seed; where one is found in ``left``, the
    run around it is measured at once, so that long common text costs a few comparisons. A run of
    less than twice a window may hold no seed, and is then not counted.
    """
    window = MIN_RUN_TOKENS * size
    seeds: dict[bytes, list[int]] = {}
    # From the end, so that the first place is taken first.
    for spot in range((len(right) // window - 1) * window, -1, -window):
        seeds.setdefault(right[spot : spot + window], []).append(spot)
    taken = bytearray(len(right) // window + 1)
    known, at, free_from = 0, 0, 0
    while at + window <= len(left):
        found = _free_seed(seeds.get(left[at : at + window]), taken, window)
        if found is None:
            at += size
            if at % (_YIELD_TOKENS * size) == 0:
                time.sleep(0)
            continue
        reach = min(window, at - free_from, found)
        before = _common_suffix(left[at - reach : at], right[found - reach : found], size)
        end = at + _run_length(left, at, right, found, size)
        first, last = found // window, (found + end - at) // window
        taken[first:last] = b"\1" * (last - first)
        known += before + end - at
        at = free_from = end
    return known // size


def _free_seed(spots: list[int] | None, taken: bytearray, window: int) -> int | None:
    while spots:
        spot = spots.pop()
        if not taken[spot // window]:
            return spot
    return None


def _run_length(left: bytes, at: int, right: bytes, spot: int, size: int) -> int:
    """Return how many bytes from two places on are equal, in whole items; O(that many)."""
    length, step = 0, _FIRST_STEP * size
    longest = min(len(left) - at, len(right) - spot)
    while step >= size:
        piece = min(step, longest - length)
        begin, end = at + length, spot + length
        if piece >= size and left[begin : begin + piece] == right[end : end + piece]:
            length += piece
            step *= 2
        else:
            step = min(step, piece) // 2 // size * size
    return length
