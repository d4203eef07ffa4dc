"""All slots of the store: where each lies, and how many are in use."""

from __future__ import annotations

from bisect import bisect_right
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from runner.tiers.segments.files import Segment

Run = tuple["Segment", int, int]
"""Neighbouring slots of one segment: it, the first slot within it, how many."""


class Arena:
    """Segments side by side, their slots numbered through. It only grows.

    Any thread may read; one at a time adds.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        # One value, so that a reader never sees a segment without its first slot.
        self._state: tuple[tuple[Segment, ...], tuple[int, ...], int] = ((), (), 0)
        for segment in segments:
            self.add(segment)

    @property
    def segments(self) -> tuple[Segment, ...]:
        """All of them, by their first slot."""
        return self._state[0]

    @property
    def num_slots(self) -> int:
        """Slots there are."""
        return self._state[2]

    @property
    def num_live(self) -> int:
        """Slots that hold a block."""
        return sum(segment.num_live for segment in self.segments)

    def add(self, segment: Segment) -> None:
        """Append a segment: its slots come after all others."""
        segments, firsts, num_slots = self._state
        self._state = (
            (*segments, segment),
            (*firsts, num_slots),
            num_slots + segment.num_slots,
        )

    def locate(self, slot: int) -> tuple[Segment, int] | None:
        """Return the segment of a slot and the slot's number in it; None if there is none."""
        segments, firsts, num_slots = self._state
        if not 0 <= slot < num_slots:
            return None
        index = bisect_right(firsts, slot) - 1
        return segments[index], slot - firsts[index]

    def runs(self, slots: Sequence[int], max_blocks: int) -> list[Run]:
        """Group slots that follow each other, in the order given, into runs of one segment.

        Slots that do not exist are left out.
        """
        runs: list[Run] = []
        for slot in slots:
            found = self.locate(slot)
            if found is None:
                continue
            segment, first = found
            if runs:
                last, start, count = runs[-1]
                if last is segment and start + count == first and count < max_blocks:
                    runs[-1] = (segment, start, count + 1)
                    continue
            runs.append((segment, first, 1))
        return runs
